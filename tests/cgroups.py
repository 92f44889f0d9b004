"""A real cgroup with a quota of CPU time, for tests and benchmarks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NUMBERS = count()


@contextmanager
def quota(cpus: float) -> Iterator[tuple[str, ...]]:
    """Yield the words that start a command in a group with the time of so many CPUs; raises OSError without the right.

    Of cgroup v1 or v2, as this machine has it.
    """
    v1 = (CGROUPS / "cpu/cpu.cfs_quota_us").exists() or (CGROUPS / "cpu/tasks").exists()
    group = (CGROUPS / "cpu" if v1 else CGROUPS) / f"reference-training-{os.getpid()}-{next(NUMBERS)}"
    group.mkdir()
    try:
        time_us = f"{cpus * 100_000:.0f}"
        (group / ("cpu.cfs_quota_us" if v1 else "cpu.max")).write_text(time_us if v1 else f"{time_us} 100000")
        yield ("sh", "-c", f'echo $$ >{group}/cgroup.procs && exec "$@"', "sh")
    finally:
        group.rmdir()
