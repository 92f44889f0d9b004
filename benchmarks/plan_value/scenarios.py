"""States of the machine: bare, with a quota, with an affinity mask, with busy processes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from tools.busy_processes import busy_processes
from tools.cgroups import quota


@contextmanager
def bare() -> Iterator[Sequence[str]]:
    """Change nothing."""
    yield ()


@contextmanager
def mask_of_one() -> Iterator[Sequence[str]]:
    """Allow one CPU."""
    yield ("taskset", "-c", str(min(os.sched_getaffinity(0))))


@contextmanager
def one_busy_cpu() -> Iterator[Sequence[str]]:
    """Keep the first CPU busy."""
    with busy_processes([min(os.sched_getaffinity(0))]):
        yield ()


@contextmanager
def every_cpu_busy() -> Iterator[Sequence[str]]:
    """Keep every CPU busy, so that there are two threads per CPU."""
    with busy_processes(sorted(os.sched_getaffinity(0))):
        yield ()


SCENARIOS = {
    "bare": bare,
    "quota of 1 CPU": partial(quota, 1.0),
    "mask of 1 CPU": mask_of_one,
    "2x over-subscribed": every_cpu_busy,
    "busy process": one_busy_cpu,
}
