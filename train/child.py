"""Ask a child process what only torch, or code of the user's, can say: the plan itself loads neither."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from entrypoint.core.console import last_error_line
from entrypoint.core.errors import printable
from entrypoint.core.process import module_command

TIMEOUT_S = 600
Answer = TypeVar("Answer")


def ask_child(module: str, question: bytes, kind: type[Answer], python: str = sys.executable) -> Answer:
    """Return the last line that a module of ours prints, given a question; raises ValueError if that is no answer."""
    command = module_command(module, python=python)
    try:
        done = subprocess.run(command, input=question, capture_output=True, timeout=TIMEOUT_S, check=False)
        return msgspec.json.decode(done.stdout.rpartition(b"\n")[2], type=kind)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {TIMEOUT_S} s") from None
    except msgspec.MsgspecError:
        cause = last_error_line(done.stderr.decode(errors="replace"), f"exit code {done.returncode}")
        raise ValueError(printable(cause)) from None


def answer(report_on: Callable[[bytes], object]) -> None:
    """Print what a question on standard input gives, as the last line of standard output."""
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print
        report = report_on(sys.stdin.buffer.read())
    sys.stdout.flush()
    os.write(1, b"\n" + msgspec.json.encode(report))
