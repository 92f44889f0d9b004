"""Prints lines and errors on standard error, or into torchelastic's error file."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from entrypoint.core.errors import ExitCode, PeerLostError, UserError

# Set by the process that starts mpirun: ranks on any node then also print status records for it on standard error.
STATUS_VAR = "ENTRYPOINT_STATUS_RECORDS"
STATUS_PREFIX = "entrypoint-status: "


def last_error_line(text: str, otherwise: str) -> str:
    """Return the last line of a command's output, which names its error, or `otherwise` for no output.

    The prefix of our own errors is left out.
    """
    return (text.strip().splitlines() or [otherwise])[-1].removeprefix(error_prefix(ExitCode.USAGE))


def report_error(error: UserError) -> int:
    """Report an error and return its exit code.

    Under torchrun's agent it goes into the error file that the agent reads, so that only the first of many ranks that
    fail of one cause is shown. The file has the form of torch.distributed.elastic's ErrorHandler, with keys of ours.
    Else it goes to standard error.
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
        if error.code == ExitCode.PREEMPTED:
            report_status(preempted=True)
    return int(error.code)


def report_status(**fields: object) -> None:
    """Print a status record as one line of JSON, if the process that started mpirun reads them."""
    if os.environ.get(STATUS_VAR):
        write_stderr(f"{STATUS_PREFIX}{json.dumps(fields)}")


def write_stderr(line: str) -> None:
    """Print a line on standard error; if nobody reads it any more, discard this line and later ones.

    A closed terminal must not change the exit code.
    """
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        os.close(devnull)


def log(line: str) -> None:
    """Print a line of the entrypoint's own."""
    write_stderr(f"entrypoint: {line}")


def error_prefix(code: int) -> str:
    """Return the prefix of a last line: a preempted run is no error, because it can resume."""
    return "entrypoint: preempted: " if code == ExitCode.PREEMPTED else "entrypoint: error: "
