"""What C++ prints, past Python's own streams, kept away from the terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

STDOUT, STDERR = 1, 2


@contextmanager
def redirected(number: int, to: int) -> Iterator[None]:
    """Let what is written to descriptor STDOUT or STDERR go to the open one `to` meanwhile."""
    (sys.stdout if number == STDOUT else sys.stderr).flush()
    kept = os.dup(number)
    os.dup2(to, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)
