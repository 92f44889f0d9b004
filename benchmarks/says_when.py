"""A script that says when it begins, and stays until its input ends."""

import os
import sys
import time

os.write(1, f"{time.time()}\n".encode())  # one write: several ranks' lines stay whole
sys.stdin.read()
