"""Programs on a terminal of their own, which a test reads and types to."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import LAUNCH_LIMIT_S, clean_environment


class Terminal:
    """A program on a terminal of its own: what it has said so far, and what is typed to it."""

    def __init__(self, process: int, terminal: int) -> None:
        self.process, self.terminal, self.said = process, terminal, b""

    def wait_for(self, words: bytes) -> None:
        """Read on to these words."""
        until = time.monotonic() + LAUNCH_LIMIT_S
        while words not in self.said:
            assert self.read(), self.said.decode()
            assert time.monotonic() < until, self.said.decode()

    def read(self) -> bytes:
        """Read on; nothing when nobody is left who could write."""
        assert select.select([self.terminal], [], [], LAUNCH_LIMIT_S)[0], self.said.decode()
        try:
            data = os.read(self.terminal, 65536)
        except OSError:  # EIO: the other side is closed
            return b""
        self.said += data
        return data

    def ended(self) -> int:
        """Read to the end and return the exit code."""
        while self.read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@contextmanager
def terminal(folder: Path, command: tuple[str, ...], env: dict[str, str]) -> Iterator[Terminal]:
    """Start a program on a terminal."""
    process, file = pty.fork()
    if not process:
        os.chdir(folder)
        os.execvpe(command[0], command, {**clean_environment(), **env})
    try:
        yield Terminal(process, file)
    finally:
        os.close(file)
