"""How much of this process's CPUs others use, by the kernel's own count."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

STAT = Path("/proc/stat")
# Long enough for the kernel's ticks of 10 ms to tell a tenth of a CPU.
LOOK_S = 0.2
# Columns of a CPU's line whose time nobody used: idle, iowait (kernel docs, filesystems/proc.rst).
UNUSED = (3, 4)
# So many CPUs that are used come from anybody's small chores.
CHORES = 0.2


def read_used(cpus: frozenset[int], stat: Path = STAT) -> Mapping[int, tuple[int, int]]:
    """Return for each of these CPUs the ticks that it was used, and all that it had, since the machine started.

    Empty where the kernel's count cannot be read. What the host took from a virtual machine counts as used.
    """
    used = {}
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            name, *words = line.split()
            number = name.removeprefix("cpu")
            if name != number and number.isdecimal() and int(number) in cpus:
                ticks = [int(word) for word in words[:8]]  # those of guests are in the first ones already
                used[int(number)] = sum(ticks) - sum(ticks[column] for column in UNUSED), sum(ticks)
    return used


def busy(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> float:
    """Return how many CPUs were used between two readings, 0 to their number."""
    spans = [(used - before[cpu][0], whole - before[cpu][1]) for cpu, (used, whole) in after.items() if cpu in before]
    return sum(used / whole for used, whole in spans if whole > 0)


def look(seconds: float = LOOK_S) -> float:
    """Return how many of this process's CPUs are used while it waits so long, and so by others."""
    cpus = frozenset(os.sched_getaffinity(0))
    before = read_used(cpus)
    time.sleep(seconds)
    return busy(before, read_used(cpus))


def told_of(looks: Sequence[float]) -> str:
    """Return the words about the CPUs that others used at most looks, none for a few chores."""
    used = statistics.median(looks) if looks else 0.0
    return f", beside others who used {used:.1f} of {len(os.sched_getaffinity(0))} CPUs" if used >= CHORES else ""
