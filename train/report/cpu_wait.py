"""Measure how long the trainer's threads waited for a CPU, by the kernel's counters."""

from __future__ import annotations

import time
from collections.abc import Mapping

from entrypoint.machine.cpu_load import read_run_delays

# Smaller shares are not reported.
MIN_REPORTED_SHARE = 0.2


def max_wait_share(before: Mapping[str, int], after: Mapping[str, int], seconds: float) -> float:
    """Return the share of a time (s) that the thread which waited longest in it has waited, 0 to 1."""
    longest = max((wait - before.get(thread, 0) for thread, wait in after.items()), default=0)
    return min(1.0, longest / 1e9 / seconds) if seconds > 0 else 0.0


class CpuWaitMeter:
    """CPU wait times since this meter was created."""

    def __init__(self) -> None:
        self.began, self.before = time.monotonic(), read_run_delays()

    def share(self) -> float:
        """Return the share of the time since then that the thread which waited longest has waited."""
        return max_wait_share(self.before, read_run_delays(), time.monotonic() - self.began)


def cpu_wait_text(share: float) -> str:
    """Return a text about the wait share, or an empty text if the share is small."""
    if share < MIN_REPORTED_SHARE:
        return ""
    return (
        f"{100 * share:.0f} % of the time threads waited for a CPU (other processes or a CPU limit);"
        " try `entrypoint tune`"
    )
