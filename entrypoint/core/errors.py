"""What is said on standard error, and how a refusal ends: one clear line, an exit code of the documented table."""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes that people script against; the README's table says the same."""

    DONE = 0
    USAGE = 2
    MACHINE = 3
    RENDEZVOUS = 4
    RANK_FAILED = 5
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


# What starting the ranks again would not mend.
NOT_RETRYABLE = (ExitCode.USAGE, ExitCode.MACHINE, ExitCode.PREEMPTED)


class UserError(Exception):
    """What is wrong, the value seen and what to do, with the exit code that says which kind it is."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


class PeerLostError(UserError):
    """Another rank went away: a consequence of that rank's own failure, which is shown before it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.RANK_FAILED)


def printable(value: object) -> str:
    """Return a value that a person or a launcher has set as one short printable word of a message."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `Did you mean X? ` where a known word is close to the one seen, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]}? " if close else ""


def describe_exit(code: int, out_of_memory: str = "") -> str:
    """Say how a process ended; a negative code is the signal that ended it, and why the kernel killed may be known."""
    if code >= 0:
        return f"exit code {code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = f": {out_of_memory}" if out_of_memory else "; the kernel does this when memory runs out"
    return f"killed by {signal.Signals(-code).name}{hint}"
