"""Measure from the kernel's counters how many of this process's CPUs other processes use."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

STAT_PATH, TASKS_PATH = Path("/proc/stat"), Path("/proc/self/task")
# Columns of unused time in a CPU's line: idle, iowait (kernel docs, filesystems/proc.rst).
IDLE_COLUMNS = (3, 4)
# The column of time that the host took from a virtual machine. Leaving a CPU free does not return that time.
STEAL_COLUMN = 7
# The share of a one-minute-old load in the kernel's one-minute average.
MIN_LOAD_SHARE = 0.6


def read_cpu_ticks(
    cpus: frozenset[int], stat: Path = STAT_PATH, unused: Sequence[int] = IDLE_COLUMNS
) -> Mapping[int, tuple[int, int]]:
    """Return the used and the total ticks of each of these CPUs since the machine started.

    Empty if the kernel's counters cannot be read. Time that the host took from a virtual machine counts as used.
    """
    used = {}
    with suppress(OSError):
        for line in stat.read_text().splitlines():
            name, *words = line.split()
            number = name.removeprefix("cpu")
            if name != number and number.isdecimal() and int(number) in cpus:
                ticks = [int(word) for word in words[:8]]  # the first columns already include guest time
                used[int(number)] = sum(ticks) - sum(ticks[column] for column in unused), sum(ticks)
    return used


def busy_cpus_between(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> float:
    """Return how many CPUs were used between two readings, 0 to their number."""
    spans = [(used - before[cpu][0], whole - before[cpu][1]) for cpu, (used, whole) in after.items() if cpu in before]
    return sum(used / whole for used, whole in spans if whole > 0)


class LoadSample(Struct, frozen=True):
    """The start of a sample: the clock, this process's CPU time, and the kernel's counters."""

    clock_s: float
    own_s: float
    used: Mapping[int, tuple[int, int]]


def take_sample() -> LoadSample:
    """Start a sample during which this process works too."""
    used = read_cpu_ticks(frozenset(os.sched_getaffinity(0)), unused=(*IDLE_COLUMNS, STEAL_COLUMN))
    return LoadSample(time.monotonic(), own_cpu_seconds(), used)


def own_cpu_seconds() -> float:
    """Return the CPU time of this process and its exited children, minus the time that it waited for a CPU.

    While this process delays, other processes use its CPU.
    """
    return sum(os.times()[:4]) - sum(read_run_delays().values()) / 1e9


def read_run_delays(tasks: Path = TASKS_PATH, thread: str = "*") -> dict[str, int]:
    """Return for each thread of this process, or for one, the nanoseconds that it was runnable and did not run.

    Source: kernel docs, scheduler/sched-stats.rst; empty if the kernel does not count them.
    """
    delays = {}
    for path in tasks.glob(f"{thread}/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has exited
            delays[path.parent.name] = int(path.read_text().split()[1])
    return delays


def other_busy_cpus(before: LoadSample) -> float:
    """Return how many of this process's CPUs other processes keep busy, 0 if the kernel does not count them.

    The load counts only if the one-minute average (getloadavg(3)) confirms it, so that processes that just exited or
    just started are ignored.
    """
    now = take_sample()
    used = busy_cpus_between(before.used, now.used)
    others = used - (now.own_s - before.own_s) / (now.clock_s - before.clock_s)
    with suppress(OSError):  # /proc is hidden
        return round(min(max(0.0, others), len(now.used)), 2) if os.getloadavg()[0] >= MIN_LOAD_SHARE * others else 0.0
    return 0.0
