"""How much of this process's CPUs others use, by the kernel's own counts."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STAT_PATH, LOADAVG_PATH, TASKS_PATH = Path("/proc/stat"), Path("/proc/loadavg"), Path("/proc/self/task")
# Long enough for the kernel's ticks of 10 ms to tell a tenth of a CPU.
SAMPLE_S = 0.2
# Columns of a CPU's line whose time nobody used: idle, iowait (kernel docs, filesystems/proc.rst).
IDLE_COLUMNS = (3, 4)
# The column of what the host took from a virtual machine: its time comes back to nobody who leaves a CPU free.
STEAL_COLUMN = 7
# What the kernel's average over the last minute has of a load that began so long ago.
MIN_LOAD_SHARE = 0.6
# CPUs that were idle for less are as good as all in use.
IDLE_SLACK = 0.1
# So many CPUs that are used come from anybody's small chores.
MIN_REPORTED = 0.2


def read_cpu_ticks(
    cpus: frozenset[int], stat: Path = STAT_PATH, unused: Sequence[int] = IDLE_COLUMNS
) -> Mapping[int, tuple[int, int]]:
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
                used[int(number)] = sum(ticks) - sum(ticks[column] for column in unused), sum(ticks)
    return used


def busy_cpus_between(before: Mapping[int, tuple[int, int]], after: Mapping[int, tuple[int, int]]) -> float:
    """Return how many CPUs were used between two readings, 0 to their number."""
    spans = [(used - before[cpu][0], whole - before[cpu][1]) for cpu, (used, whole) in after.items() if cpu in before]
    return sum(used / whole for used, whole in spans if whole > 0)


def sample_busy_cpus(seconds: float = SAMPLE_S) -> float:
    """Return how many of this process's CPUs are used while it waits so long, and so by others."""
    cpus = frozenset(os.sched_getaffinity(0))
    before = read_cpu_ticks(cpus)
    time.sleep(seconds)
    return busy_cpus_between(before, read_cpu_ticks(cpus))


def busy_cpus_note(looks: Sequence[float]) -> str:
    """Return the words about the CPUs that others used at most looks, none for a few chores."""
    used = sorted(looks)[(len(looks) - 1) // 2] if looks else 0.0
    return f", beside others who used {used:.1f} of {len(os.sched_getaffinity(0))} CPUs" if used >= MIN_REPORTED else ""


@dataclass(frozen=True)
class LoadSample:
    """When a span began: the clock, what this process had of the CPUs until then, and the kernel's counts.

    `load` is the average of the last minute of those that run or wait, `running` how many of them there are now.
    """

    clock_s: float
    own_s: float
    used: Mapping[int, tuple[int, int]]
    load: float
    running: int


def take_sample(load: Path = LOADAVG_PATH) -> LoadSample:
    """Begin a span in which this process works too."""
    cpus = frozenset(os.sched_getaffinity(0))
    lasting, running = read_load(load)
    return LoadSample(
        time.monotonic(),
        own_cpu_seconds(),
        read_cpu_ticks(cpus, unused=(*IDLE_COLUMNS, STEAL_COLUMN)),
        lasting,
        running,
    )


def read_load(load: Path) -> tuple[float, int]:
    """Return the load of the last minute and how many run or wait now (proc_loadavg(5)), zeros where /proc hides it."""
    try:
        words = load.read_text().split()
        return float(words[0]), int(words[3].partition("/")[0])
    except (OSError, ValueError, IndexError):
        return 0.0, 0


def own_cpu_seconds() -> float:
    """Return how long this process and its ended children were on a CPU, less how long it had to wait for one.

    While it waits, others have the CPU that it would use: without it they would use more, not less.
    """
    return sum(os.times()[:4]) - sum(read_run_delays().values()) / 1e9


def read_run_delays(tasks: Path = TASKS_PATH) -> dict[str, int]:
    """Return for each thread of this process the nanoseconds that it was ready to run and did not.

    Source: kernel docs, scheduler/sched-stats.rst; empty where the kernel does not count them.
    """
    waits = {}
    for path in tasks.glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # a thread that has ended meanwhile
            waits[path.parent.name] = int(path.read_text().split()[1])
    return waits


def other_busy_cpus(since: LoadSample, load: Path = LOADAVG_PATH) -> float:
    """Return how many of this process's CPUs others keep busy, 0 where the kernel does not tell.

    Where no CPU was idle, those that wait for each other count too. What they use now counts where as much ran or
    waited over the last minute: neither what has ended nor what has just begun is a neighbour.
    """
    now = take_sample(load)
    span_s = now.clock_s - since.clock_s
    used = busy_cpus_between(since.used, now.used)
    others = used - (now.own_s - since.own_s) / span_s if span_s > 0 else 0.0
    if used > len(now.used) - IDLE_SLACK:
        others = max(others, min(since.running, now.running) - 1)
    others = min(others, len(now.used))  # those who wait, or what this process waited for, come to more
    return round(max(0.0, others), 2) if now.load >= MIN_LOAD_SHARE * others else 0.0
