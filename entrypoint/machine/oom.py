"""Detect from the kernel's counters whether the OOM killer killed a process."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct

from entrypoint.machine.cgroup import NO_LIMIT_BYTES, iter_cgroup_dirs, memory_limit, read_positive_int


class MemoryEvents(Struct, frozen=True):
    """The OOM kills in this process's cgroup, the cgroup's limit and its peak (None if unknown)."""

    kills: int = 0
    limit_bytes: int | None = None
    peak_bytes: int | None = None


def read_memory(root: Path) -> MemoryEvents:
    """Read the counters of this process's cgroup, or of its ancestor with the tightest limit.

    Source: kernel docs, admin-guide/cgroup-v2.rst (memory.events, memory.peak) and cgroup-v1/memory.rst
    (memory.oom_control, memory.max_usage_in_bytes); /proc/vmstat counts the whole machine's kills.
    """
    groups: list[MemoryEvents] = []
    for folder in iter_cgroup_dirs(root):
        kills = read_oom_kills(folder / "memory.events", folder / "memory.oom_control")
        limit = memory_limit(folder)
        peak = read_positive_int(folder / "memory.peak") or read_positive_int(folder / "memory.max_usage_in_bytes")
        if kills is not None or limit:
            groups.append(MemoryEvents(kills or 0, limit, peak))
    if not groups:
        return MemoryEvents(read_oom_kills(root / "proc/vmstat") or 0)
    tightest = min(groups, key=lambda group: group.limit_bytes or NO_LIMIT_BYTES)
    return MemoryEvents(max(groups[0].kills, tightest.kills), tightest.limit_bytes, tightest.peak_bytes)


def read_oom_kills(*paths: Path) -> int | None:
    """Return the `oom_kill` counter of the first file that has one, or None."""
    for path in paths:
        try:
            found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def oom_message(before: MemoryEvents, after: MemoryEvents) -> str:
    """Return a message with the limit, the peak and a fix if an OOM kill occurred in between, else an empty string."""
    if after.kills <= before.kills:
        return ""
    has = "the machine's" if after.limit_bytes is None else f"the {gib(after.limit_bytes)} that this job may use"
    peak = f" (peak {gib(after.peak_bytes)})" if after.peak_bytes else ""
    advice = (
        "lower TRAIN_BATCH_SIZE or TRAIN_NUM_WORKERS, stream an imagefolder (TRAIN_DATA_SOURCE=stream), or ask for more"
    )
    return f"out of memory, {has}{peak}; {advice}"


def gib(count: int) -> str:
    """Return bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"
