"""What is said on standard error, and how a refusal ends: one clear line, an exit code of the documented table."""

from __future__ import annotations

import difflib
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path


class Exit(IntEnum):
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
FINAL = (Exit.USAGE, Exit.MACHINE, Exit.PREEMPTED)


class Refused(Exception):
    """What is wrong, the value seen and what to do, with the exit code that says which kind it is."""

    def __init__(self, message: str, code: Exit = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


class LostPeer(Refused):
    """Another rank went away: a consequence of that rank's own failure, which is shown before it."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.RANK_FAILED)


def shown(value: object) -> str:
    """Return a value that a person or a launcher has set as one short printable word of a message."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)[1:-1]
    return text if len(text) <= 80 else text[:77] + "..."


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its name where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def last_line(text: str, otherwise: str) -> str:
    """Return the last line of what a command has said, which names its error, or what to say where it said nothing.

    What our own lines begin with is left out: who shows it says whose it is.
    """
    return (text.strip().splitlines() or [otherwise])[-1].removeprefix(prefix(Exit.USAGE))


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `Did you mean X? ` where a known word is close to the one seen, else nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"Did you mean {close[0]}? " if close else ""


def report(error: Refused) -> int:
    """Tell a refusal to whoever listens and return its exit code.

    Under torchrun's agent it goes into the error file that the agent reads, so that of many ranks that fail of
    one cause only the first is shown; the file's form is that of torch.distributed.elastic's ErrorHandler,
    with our own keys beside. Else it goes to standard error, a line each.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        now_ns = time.time_ns()
        extra = {
            "timestamp": str(now_ns // 10**9),
            "time_ns": now_ns,
            "refused": True,
            "code": int(error.code),
            "lost_peer": isinstance(error, LostPeer),
        }
        Path(error_file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))
    else:
        for line in str(error).splitlines():
            put(f"{prefix(error.code)}{line}")
    return int(error.code)


def put(line: str) -> None:
    """Print a line on standard error; where nobody reads that any more, it goes nowhere, as does what follows.

    A terminal that was closed is no reason to end with another code than the one that is settled.
    """
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def say(line: str) -> None:
    """Tell how things stand."""
    put(f"entrypoint: {line}")


def how_ended(code: int, out_of_memory: str = "") -> str:
    """Say how a process ended; a negative code is the signal that ended it, and why the kernel killed may be known."""
    if code >= 0:
        return f"exit code {code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = f": {out_of_memory}" if out_of_memory else "; the kernel does this when memory runs out"
    return f"killed by {signal.Signals(-code).name}{hint}"


def prefix(code: int) -> str:
    """Return what a last line begins with: a preempted run is no error, it goes on when it is run again."""
    return "entrypoint: preempted: " if code == Exit.PREEMPTED else "entrypoint: error: "
