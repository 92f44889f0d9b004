"""Which of a node's ranks failed first, and what the job says and ends with: for whoever has started them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from entrypoint.core.console import error_prefix, write_stderr
from entrypoint.core.errors import ExitCode, describe_exit

# What each rank's error file is called, in a folder of its own.
ERROR_FILE = "error.json"


@dataclass(frozen=True)
class Failure:
    """How a rank of this node ended: its code (negative: a signal), when (Unix time, ns), and whether it was told to.

    `word` is what it left in its error file, in the form of torch.distributed.elastic's ErrorHandler.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    when_ns: int
    ended_by_agent: bool = False
    word: Mapping[str, Any] = field(default_factory=dict)

    @property
    def extra(self) -> Mapping[str, Any]:
        """What it wrote beside its message, nothing where it wrote none."""
        return dict(self.word.get("extraInfo", {}))


def first_failure(failures: Iterable[Failure], memory: str = "") -> tuple[str, int]:
    """Return which rank failed first and with what, and the code to end with.

    A rank that the agent has ended, or that only lost its peer, is a consequence, so it comes after any other
    failure. A rank's own code is kept; one that a signal ended gives 5, with what `memory` tells of the kernel.
    """
    failure = min(failures, key=failure_sort_key)
    if failure.extra.get("refused"):
        return str(failure.word["message"]), failure.exitcode
    place = f"rank {failure.rank} of this job (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.exitcode < 0:
        return f"{place} failed first: {describe_exit(failure.exitcode, memory)}", ExitCode.RANK_FAILED
    return f"{place} failed first, with exit code {failure.exitcode}", failure.exitcode


def failure_sort_key(failure: Failure) -> tuple[bool, bool, int, int]:
    """Return the sorting key of a failure: causes before consequences, signals first, then by time and rank.

    A rank that a signal ended wrote no time, and one that ends by itself in the same second may be reacting.
    """
    consequence = failure.ended_by_agent or bool(failure.extra.get("lost_peer"))
    return consequence, failure.exitcode > 0, int(failure.extra.get("time_ns", failure.when_ns)), failure.rank


def parse_error_file(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message of an error file's content, nothing where it is in another form."""
    message = content.get("message")
    return message if isinstance(message, dict) else {}


def read_error_file(file: Path) -> Mapping[str, Any]:
    """Return what a rank left in its error file, nothing where there is none or it was killed amid writing."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return parse_error_file(content) if isinstance(content, dict) else {}


def report_stop(folder: Path, number: Signals) -> int:
    """Say how the ranks took a signal that was passed on to them: saved, to go on, or just ended; return the code.

    `folder` holds the file of each rank that had something to say, in a folder for each time that ranks were started.
    """
    for file in sorted(folder.glob(f"**/{ERROR_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        word = read_error_file(file)
        if word.get("extraInfo", {}).get("code") == ExitCode.PREEMPTED:
            return print_final_message(word["message"], ExitCode.PREEMPTED)
    return print_final_message(f"stopped by {number.name}", 128 + number)


def print_final_message(message: str, code: int) -> int:
    """Print the job's last line and return its code."""
    write_stderr(f"{error_prefix(code)}{message}")
    return int(code)
