"""Find the rank of a node that failed first or is missing from a collective, and print the job's final message."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from signal import Signals
from typing import Any

from msgspec import Struct, field

from entrypoint.core.console import error_prefix, log, read_error_record, write_stderr
from entrypoint.core.errors import COLLECTIVE_KEY, ExitCode, describe_exit
from entrypoint.plan.model import Plan

# The name of each rank's error file, in the rank's own folder.
ERROR_FILE = "error.json"


class Failure(Struct, frozen=True):
    """How a rank of this node exited: its code (negative: a signal), when (Unix time, ns), and whether it was stopped.

    `error_file` is the message in its error file, in the form of torch.distributed.elastic's ErrorHandler.
    """

    rank: int
    local_rank: int
    pid: int
    exitcode: int
    when_ns: int
    ended_by_agent: bool = False
    error_file: Mapping[str, Any] = field(default_factory=dict)

    @property
    def extra_info(self) -> Mapping[str, Any]:
        """Return the extra information of its message, empty if there is none."""
        return dict(self.error_file.get("extraInfo", {}))

    @property
    def lost_peer(self) -> bool:
        """Return whether the rank only waited for another one in vain."""
        return bool(self.extra_info.get("lost_peer"))

    @property
    def lost_collective(self) -> Mapping[str, str]:
        """Return where the rank waited for others in vain (`core.collective_error`), empty for another failure."""
        collective = self.extra_info.get(COLLECTIVE_KEY)
        return collective if isinstance(collective, dict) else {}

    @property
    def timed_out(self) -> bool:
        """Return whether the rank waited in a collective until its time limit."""
        return self.lost_collective.get("how") == "timeout"


def first_failure(failures: Iterable[Failure], memory: str = "") -> tuple[str, int]:
    """Return the message about the rank that failed first, and the exit code of the job.

    A rank that the agent stopped, or that only lost its peer, comes after any other failure. A rank's own exit code is
    kept. A rank that a signal killed gives 5, with `memory` as the out-of-memory message.
    """
    failure = first_failed(failures)
    if failure.extra_info.get("refused"):
        return str(failure.error_file["message"]), failure.exitcode
    rank = f"rank {failure.rank} of this job (local rank {failure.local_rank}, pid {failure.pid})"
    if failure.exitcode < 0:
        return f"{rank} failed first: {describe_exit(failure.exitcode, memory)}", ExitCode.RANK_FAILED
    return f"{rank} failed first, with exit code {failure.exitcode}", failure.exitcode


def first_failed(failures: Iterable[Failure]) -> Failure:
    """Return the failure that caused the others."""
    return min(failures, key=failure_sort_key)


def failure_sort_key(failure: Failure) -> tuple[bool, bool, bool, int, int]:
    """Return the sorting key of a failure: causes before consequences, signals first, then by time and rank.

    A rank that lost its peer says more than one that the agent then stopped. A rank that a signal killed recorded no
    time. A rank that exits in the same second may react to that.
    """
    when_ns = failure.extra_info.get("time_ns", failure.when_ns)
    return failure.ended_by_agent, failure.lost_peer, failure.exitcode > 0, int(when_ns), failure.rank


def explain_hang(
    failures: Sequence[Failure], running: Mapping[int, int], ended: Sequence[int]
) -> tuple[str, tuple[str, ...]]:
    """Return a line about the ranks that are missing from the collective that failed, and their stacks.

    Both are empty where they are not known. `failures` are those of the ranks that waited, `running` maps the ranks
    that still run to their processes, and `ended` are those that ended without an error.
    """
    from entrypoint.hang import stacks  # late: a start needs none of them
    from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

    waited = next((failure for failure in failures if failure.timed_out), failures[0])
    lost = waited.lost_collective
    # Without a timeout another rank closed the connection, and ends as well.
    missing = stacks.find_missing(running, lost.get("place", ""), MONITOR) if waited.timed_out or not lost else {}
    texts = tuple(
        stacks.stacks_text(f"rank {rank}  {absent.text}", absent.stacks)
        for rank, absent in missing.items()
        if absent.stacks
    )
    if not missing and (waited.timed_out or not running):
        missing = dict.fromkeys(sorted(ended), stacks.Whereabouts("its program has ended"))
    if not missing or not lost:
        return "", texts
    until = "until its time limit" if waited.timed_out else "in vain"
    return stacks.missing_line(missing, lost, waited.rank, until), texts


def report_stop(folder: Path, number: Signals, codes: Iterable[int], since: float = 0.0) -> int:
    """Print how the ranks reacted to a forwarded signal: saved, could not, or just ended; return the exit code.

    `folder` holds the error files of the ranks, in one folder for each start of the ranks, written `since` this time.
    A script of the user's says by its code that it has saved; `codes` are those of the ranks (negative: a signal).
    """
    for file in sorted(folder.glob(f"**/{ERROR_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True):
        message = read_error_record(file) if file.stat().st_mtime >= since else {}
        extra = message.get("extraInfo", {})
        if extra.get("refused") and not extra.get("lost_peer"):
            return print_final_message(message["message"], extra["code"])
    ended = set(codes) - {-number, 128 + number}
    code = ExitCode.PREEMPTED if ended == {ExitCode.PREEMPTED} else 128 + number
    return print_final_message(f"stopped by {number.name}", code)


def repeat_warning(plan: Plan) -> None:
    """Print the warning again that was the first line of the run, before what the job says at its end."""
    if plan.prominent_warning:
        log(f"warning: {plan.prominent_warning}")


def print_final_message(message: str, code: int) -> int:
    """Print the job's last line and return its code."""
    write_stderr(f"{error_prefix(code)}{message}")
    return int(code)
