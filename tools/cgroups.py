"""Real cgroups with a quota of CPU time or a limit on memory, for tests, v1 or v2 as the machine has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NUMBERS = count()
# How long what has run in a group may take to be gone from it.
LEAVE_S = 5.0


@contextmanager
def quota(cpus: float) -> Iterator[tuple[str, ...]]:
    """Yield the words that start a command in a group with the time of so many CPUs; raises OSError."""
    v1 = (CGROUPS / "cpu/cpu.cfs_quota_us").exists() or (CGROUPS / "cpu/tasks").exists()
    time_us = f"{cpus * 100_000:.0f}"
    file, text = ("cpu.cfs_quota_us", time_us) if v1 else ("cpu.max", f"{time_us} 100000")
    with group(CGROUPS / "cpu" if v1 else CGROUPS, file, text) as words:
        yield words


@contextmanager
def memory_limit(count_bytes: int) -> Iterator[tuple[str, ...]]:
    """Yield the words that start a command in a group below this process's own with so much memory; raises OSError."""
    here = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    v1 = "memory" in here
    above = (CGROUPS / "memory" if v1 else CGROUPS) / here.get("memory", here.get("", "/")).strip("/")
    with group(above, "memory.limit_in_bytes" if v1 else "memory.max", str(count_bytes)) as words:
        yield words


@contextmanager
def group(above: Path, file: str, text: str) -> Iterator[tuple[str, ...]]:
    """Make a group with one of its files written, and remove it when the last process has left."""
    folder = above / f"reference-training-{os.getpid()}-{next(NUMBERS)}"
    folder.mkdir()
    try:
        (folder / file).write_text(text)
        yield ("sh", "-c", f'echo $$ >{folder}/cgroup.procs && exec "$@"', "sh")
    finally:
        until = time.monotonic() + LEAVE_S
        while (folder / "cgroup.procs").read_text() and time.monotonic() < until:
            time.sleep(0.05)
        folder.rmdir()
