"""Prints lines and errors on standard error, or into torchelastic's error file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from entrypoint.core.errors import ExitCode, PeerLostError, UserError


def last_error_line(text: str, otherwise: str) -> str:
    """Return the last line of what a command has said, which names its error, or what to say where it said nothing.

    What our own lines begin with is left out: who shows it says whose it is.
    """
    return (text.strip().splitlines() or [otherwise])[-1].removeprefix(error_prefix(ExitCode.USAGE))


def report_error(error: UserError) -> int:
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
            "lost_peer": isinstance(error, PeerLostError),
        }
        Path(error_file).write_text(json.dumps({"message": {"message": str(error), "extraInfo": extra}}))
    else:
        for line in str(error).splitlines():
            write_stderr(f"{error_prefix(error.code)}{line}")
    return int(error.code)


def write_stderr(line: str) -> None:
    """Print a line on standard error; where nobody reads that any more, it goes nowhere, as does what follows.

    A terminal that was closed is no reason to end with another code than the one that is settled.
    """
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)


def log(line: str) -> None:
    """Tell how things stand."""
    write_stderr(f"entrypoint: {line}")


def error_prefix(code: int) -> str:
    """Return what a last line begins with: a preempted run is no error, it goes on when it is run again."""
    return "entrypoint: preempted: " if code == ExitCode.PREEMPTED else "entrypoint: error: "
