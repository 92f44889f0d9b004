"""A script that prints its start time, and runs until its input ends."""

import os
import sys
import time

os.write(1, f"{time.time()}\n".encode())  # one write, so that the lines of several ranks do not mix
sys.stdin.read()
