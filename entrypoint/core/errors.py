"""Exit codes, error classes and helpers for error messages."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes that the README documents."""

    DONE = 0
    USAGE = 2
    MACHINE = 3
    RENDEZVOUS = 4
    RANK_FAILED = 5
    PREEMPTED = 75
    INTERRUPTED = 130
    TERMINATED = 143


# Exit codes after which a restart of the ranks would fail again.
NOT_RETRYABLE = (ExitCode.USAGE, ExitCode.MACHINE, ExitCode.PREEMPTED)
# The key in a rank's error file under which a failed collective is described (see `core.collective_error`).
COLLECTIVE_KEY = "collective"
# How long the ranks that were in a failed collective have to end, before the others are what it waited for.
HANG_SETTLE_S = 1.0


class UserError(Exception):
    """An error with a message for the user (problem, value and fix) and an exit code."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code


def refuse_if(problems: Mapping[str, object], code: ExitCode = ExitCode.USAGE) -> None:
    """Raise `UserError` with the first text whose problem is there: the value says so."""
    if problem := next((text for text, is_there in problems.items() if is_there), ""):
        raise UserError(problem, code)


class PeerLostError(UserError):
    """The loss of another rank, which follows from that rank's own failure.

    `collective` says which collective failed (`core.collective_error`), if that is known.
    """

    def __init__(self, message: str, collective: Mapping[str, str] | None = None) -> None:
        super().__init__(message, ExitCode.RANK_FAILED)
        self.collective = collective


class ReportedError(UserError):
    """An error that has been reported already."""


def printable(value: object) -> str:
    """Return a value of the user or a launcher as a short printable text for a message.

    A path may have 400 characters, another text 80.
    """
    text = one_line(value)
    limit = 400 if "/" in text else 80
    return text if len(text) <= limit else text[: limit - 3] + "..."


def one_line(value: object) -> str:
    """Return a value as printable text of any length, such as a path; a line break or an escape sequence is escaped."""
    text = str(value)
    return text if text.isprintable() else ascii(text)[1:-1]


def count_text(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 rank` or `2 ranks`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `rank 3` or `ranks 1, 3`, the first eight of many."""
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its class name if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# Usual names elsewhere for values of ours.
ALIASES = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "oneccl": "ccl", "spawn": "local"}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `Did you mean X? ` if a known word is close to the given one, else an empty string.

    Case and punctuation do not count.
    """
    import difflib  # a command without a mistake starts sooner without it

    plain = {plain_word(one): one for one in known}
    alias = plain.get(plain_word(ALIASES.get(plain_word(word), "")))
    close = [alias] if alias else [plain[one] for one in difflib.get_close_matches(plain_word(word), plain, n=1)]
    return f"Did you mean {close[0]}? " if close else ""


def plain_word(word: str) -> str:
    """Return a word in lower case, letters and digits only."""
    return "".join(character for character in word.lower() if character.isalnum())


def describe_exit(code: int, out_of_memory: str = "") -> str:
    """Describe how a process exited; a negative code is a signal, and `out_of_memory` explains a SIGKILL."""
    if code >= 0:
        return f"exit code {code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = f": {out_of_memory}" if out_of_memory else "; the kernel does this when memory runs out"
    if -code == signal.SIGABRT:  # Intel's runtime aborts a process that has loaded it twice
        hint = "; if `OMP: Error #15` stands above, set LAUNCH_OPENMP=gnu"
    return f"killed by {signal.Signals(-code).name}{hint}"


# What holds secrets: URLs with a password, and variables by the last word of their names.
SECRET_IN_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^@]*:[^@]*@", re.IGNORECASE)
SECRET_WORDS = frozenset(
    {"TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "PASSPHRASE", "KEY", "APIKEY", "CREDENTIALS"}
)


def is_secret(name: str) -> bool:
    """Return whether a variable's last word says that it holds a secret; `UCX_IB_PKEY` is another word."""
    return name.upper().rpartition("_")[2] in SECRET_WORDS


def value_to_show(name: str, value: str) -> str:
    """Return the value of a variable for the user, or that it is hidden."""
    return "(hidden)" if is_secret(name) or SECRET_IN_URL.match(value) else value
