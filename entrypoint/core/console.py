"""Prints lines and errors on standard error, or into torchelastic's error file; redirects what bypasses Python."""

from __future__ import annotations

import io
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from entrypoint.core.errors import COLLECTIVE_KEY, ExitCode, PeerLostError, ReportedError, UserError

# Set by the process that starts mpirun: ranks on any node then also print status records for it on standard error.
STATUS_VAR = "ENTRYPOINT_STATUS_RECORDS"
# Set by `evaluate --json`: the program prints its result as JSON.
RESULT_VAR = "ENTRYPOINT_RESULT"
STATUS_PREFIX = "entrypoint-status: "
# A rank's monitor has a file in memory for what the rank says about its end, where torchrun has none.
RECORD_VAR = "ENTRYPOINT_ERROR_RECORD"
STDOUT, STDERR = 1, 2


def last_error_line(text: str, otherwise: str) -> str:
    """Return the last line of a command's output, which names its error, or `otherwise` for no output.

    The prefix of our own errors is left out.
    """
    return (text.strip().splitlines() or [otherwise])[-1].removeprefix(error_prefix(ExitCode.USAGE))


def open_standard_streams() -> None:
    """Open /dev/null for each standard stream that the caller closed, and print any text in any encoding.

    Else the first file that this process opens would take the stream's number, and ranks would write into it.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
            os.set_inheritable(descriptor, True)  # noqa: FBT003  # it takes no keyword
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # Python's own default for standard error


def write_stdout(text: str) -> None:
    """Print a result on standard output; raises what `writing_stdout` raises."""
    with writing_stdout():
        print(text)


@contextmanager
def writing_stdout() -> Iterator[None]:
    """Print a result in this block, which raises no other OSError.

    Raises BrokenPipeError if the reader has gone, and `UserError` if it cannot be written for another reason.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        replace_stream(STDOUT)
        raise
    except OSError as error:
        replace_stream(STDOUT)  # else Python tries again at its end
        raise UserError(
            f"standard output: cannot be written ({error.strerror}). Write it to another place.", ExitCode.MACHINE
        ) from None


def replace_stream(descriptor: int) -> None:
    """Discard what is written to a stream from now on: nobody can read it."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, descriptor)
    os.close(devnull)


@contextmanager
def redirected(number: int, to: int) -> Iterator[None]:
    """Redirect file descriptor STDOUT or STDERR to the open descriptor `to` inside this block, also for C++ code."""
    (sys.stdout if number == STDOUT else sys.stderr).flush()
    kept = os.dup(number)
    os.dup2(to, number)
    try:
        yield
    finally:
        os.dup2(kept, number)
        os.close(kept)


def report_error(error: UserError) -> int:
    """Report an error and return its exit code.

    Under torchrun's agent it goes into the error file that the agent reads, so that only the first of many ranks that
    fail of one cause is shown. The file has the form of torch.distributed.elastic's ErrorHandler, with keys of ours.
    Else it goes to standard error.
    """
    if isinstance(error, ReportedError):
        return int(error.code)
    if not write_error_file(os.environ.get("TORCHELASTIC_ERROR_FILE", ""), error):
        write_error_file(os.environ.get(RECORD_VAR, ""), error)
        for line in str(error).splitlines():
            write_stderr(f"{error_prefix(error.code)}{line}")
        if error.code == ExitCode.PREEMPTED:
            report_status(preempted=True)
    return int(error.code)


def write_error_file(path: str, error: UserError) -> bool:
    """Write an error into the agent's file; return whether there is one that can be written."""
    lost_peer = isinstance(error, PeerLostError)
    collective = error.collective if isinstance(error, PeerLostError) else None
    extra = {"refused": True, "code": int(error.code), "lost_peer": lost_peer, COLLECTIVE_KEY: collective}
    return bool(path) and write_error_record(path, str(error), extra)


def write_error_record(path: str, message: str, extra: Mapping[str, object]) -> bool:
    """Write a message and what else the launcher needs into the agent's file; return whether that was possible."""
    now_ns = time.time_ns()
    extra = {"timestamp": str(now_ns // 10**9), "time_ns": now_ns, **extra}
    text = json.dumps({"message": {"message": message, "extraInfo": extra}})
    try:  # a FIFO that nobody reads would block
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with os.fdopen(file, "w") as stream:
            stream.write(text)
    except OSError:  # a variable of another launcher, or the agent's folder is gone
        return False
    return True


def read_error_record(path: Path) -> Mapping[str, Any]:
    """Return the message of a rank's error file, empty if it is missing, incomplete or has another form."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return parse_error_record(content) if isinstance(content, dict) else {}


def parse_error_record(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message of an error file's content, empty if it has another form."""
    message = content.get("message")
    return message if isinstance(message, dict) else {}


def error_record_path(environ: Mapping[str, str]) -> str:
    """Return the file in which a rank says how it ended: torchrun's, else its monitor's; empty without one."""
    return environ.get("TORCHELASTIC_ERROR_FILE") or environ.get(RECORD_VAR, "")


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
        replace_stream(STDERR)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all data; raises OSError if nobody reads it any more.

    Another program may have made a shared terminal or pipe non-blocking.
    """
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def log(line: str) -> None:
    """Print a line of the entrypoint's own."""
    write_stderr(f"entrypoint: {line}")


@cache
def write_once(line: str) -> None:
    """Print a line on standard error, the first time only."""
    write_stderr(line)


def log_once(line: str) -> None:
    """Print a line of the entrypoint's own, the first time only."""
    write_once(f"entrypoint: {line}")


def error_prefix(code: int) -> str:
    """Return the prefix of a last line: a preempted run is no error, because it can resume."""
    return "entrypoint: preempted: " if code == ExitCode.PREEMPTED else "entrypoint: error: "
