"""Whoever reads what a run prints, and may go: a terminal that is closed, a pipe's other end, a disk that is full.

A run that printed to nobody would end amid a step, with a traceback for its last word. It saves instead, and ends as if
it had been told to.
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
    """Print within; where nobody can read it any more, have the run save and end, and print to nowhere until then."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        redirect_to_devnull()
        if STOP_CONTROLLER.number is None:
            STOP_CONTROLLER.handle(signal.SIGPIPE, None)


def redirect_to_devnull() -> None:
    """Let standard output lead nowhere, and standard error where it is the same file, pipe or terminal."""
    gone = os.fstat(STDOUT)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for number in (STDERR, STDOUT):
        if os.path.samestat(os.fstat(number), gone):
            os.dup2(nowhere, number)
    os.close(nowhere)
