"""With which code a rank's monitor exits, and the line that names the rank that failed first."""

from __future__ import annotations

from collections.abc import Sequence

from entrypoint.core.errors import NOT_RETRYABLE, ExitCode
from entrypoint.supervise.admission import FirstFailure


def final_exit_code(code: int, received: Sequence[int], failure: FirstFailure | None, *, forced: bool) -> int:
    """Return the exit code of a monitor whose program ended with `code` (negative: a signal).

    `received` are the signals that the launcher sent, and `failure` is another rank's, which came first. With `forced`
    the monitor asked its program to end. Without a failure elsewhere the launcher's signal is the cause.
    """
    kept = with_signal_code(code, received)
    if failure and (forced or (kept - 128 in received and kept != failure.code)):
        return code_after(failure)  # a launcher too ends all ranks after the first failure
    return kept if kept >= 0 else ExitCode.RANK_FAILED


def with_signal_code(code: int, received: Sequence[int]) -> int:
    """Return 128 more than its number for a signal that the launcher sent, any other code as it is."""
    return 128 - code if code < 0 and -code in received else code


def failure_message(failure: FirstFailure) -> str:
    """Return the line that names the rank that failed first, or the node that could not start."""
    if failure.before_start:
        return f"{failure.node}: {failure.how}"
    return f"rank {failure.rank} on {failure.node} failed first: {failure.how}"


def code_after(failure: FirstFailure) -> ExitCode:
    """Return the exit code of the ranks that end because another one failed."""
    kept = failure.before_start or failure.code in NOT_RETRYABLE
    return ExitCode(failure.code) if kept else ExitCode.RANK_FAILED
