"""Handle closed terminals, broken pipes and full disks while printing.

A run whose output is closed would end during a step with a traceback. It saves a checkpoint instead, and ends as if a
signal had stopped it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from train.fd_redirect import STDERR, STDOUT
from train.preemption import STOP_CONTROLLER


@contextmanager
def guarded_stdout() -> Iterator[None]:
    """Guard prints in this block; if the output is closed, request a stop and discard further output."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        redirect_to_devnull()
        if STOP_CONTROLLER.number is None:
            STOP_CONTROLLER.handle(signal.SIGPIPE, None)


def redirect_to_devnull() -> None:
    """Redirect standard output to /dev/null, and standard error too if it is the same file, pipe or terminal."""
    gone = os.fstat(STDOUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (STDERR, STDOUT):
        if os.path.samestat(os.fstat(number), gone):
            os.dup2(nowhere, number)
    os.close(nowhere)
