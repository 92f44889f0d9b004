"""Read the CPU quota and memory limit of this process's cgroup (v1 and v2, all levels up to the root).

The kernel's counters also say whether the OOM killer killed a process.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from entrypoint.machine.cpu_topology import read_number
from entrypoint.machine.procfs import read_lines

# A v1 group without a limit reports a number near 2^63. Real limits are far below a petabyte.
NO_LIMIT_BYTES = 1 << 50


def read_limits(root: Path) -> tuple[float | None, int | None]:
    """Return the CPUs (fractional) and bytes that all hierarchies in /proc/self/cgroup allow, None if unlimited.

    The tightest level counts. Source: kernel docs, admin-guide/cgroup-v2.rst (cpu.max, memory.max) and cgroup-v1
    (cpu.cfs_quota_us, memory.limit_in_bytes). A container that sees only its own subtree shows its path as `/`.
    """
    folders = list(iter_cgroup_dirs(root))
    cpus = filter(None, (v2_quota(folder) or v1_quota(folder) for folder in folders))
    return min(cpus, default=None), min(filter(None, map(memory_limit, folders)), default=None)


def iter_cgroup_dirs(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's groups, from its own up to each hierarchy's root."""
    mount = root / "sys/fs/cgroup"
    for line in read_lines(root / "proc/self/cgroup") or ["0::/"]:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers and not {"cpu", "memory"} & set(controllers.split(",")):
            continue
        tops = (
            [mount / controllers, *(mount / name for name in controllers.split(","))]
            if controllers
            else [
                mount,
                mount / "unified",
            ]
        )
        for top in dict.fromkeys(tops):
            if top.is_dir():
                own = top / path.strip("/")
                yield from (own, *(parent for parent in own.parents if parent.is_relative_to(top)))


def memory_limit(folder: Path) -> int | None:
    """Return the bytes that a group may use, None if it has no limit."""
    limit = read_positive_int(folder / "memory.max") or read_positive_int(folder / "memory.limit_in_bytes")
    return limit if limit and limit < NO_LIMIT_BYTES else None


def v2_quota(folder: Path) -> float | None:
    """Return the CPUs that `cpu.max` grants (`150000 100000` is 1.5), None for `max` or no file."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().partition(" ")
        return int(quota) / int(period or 100000)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def v1_quota(folder: Path) -> float | None:
    """Return the CPUs that the CFS quota grants, None for -1 or no file."""
    quota, period = read_positive_int(folder / "cpu.cfs_quota_us"), read_positive_int(folder / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def read_positive_int(path: Path) -> int | None:
    """Return a file's positive number, None if there is none (`max`, -1, no such file)."""
    value = read_number(path)
    return value if value and value > 0 else None


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
        "lower the batch size or the number of loader processes, or ask for more (`train`: TRAIN_BATCH_SIZE,"
        " TRAIN_NUM_WORKERS, and TRAIN_DATA_SOURCE=stream for an imagefolder)"
    )
    return f"out of memory, {has}{peak}; {advice}"


def gib(count: int) -> str:
    """Return bytes in GiB."""
    return f"{count / 2**30:.1f} GiB"
