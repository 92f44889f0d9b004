"""Redirect the output of C++ code, which bypasses Python's streams."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2


@contextmanager
def redirected(number: int, to: int) -> Iterator[None]:
    """Redirect file descriptor STDOUT or STDERR to the open descriptor `to` inside this block."""
    (sys.stdout if number == STDOUT else sys.stderr).flush()
    kept = os.dup(number)
    os.dup2(to, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
