"""How much of this process's CPUs others use: by the kernel's count, and beside real ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.neighbours import busy, look, read_used, told_of
from tests.neighbours import neighbours

# Two CPUs and one that is not allowed: user, nice, system, idle, iowait, irq, softirq, steal, guest, guest_nice.
STAT = """cpu  999 0 0 999 0 0 0 0 0 0
cpu0 100 10 20 800 50 5 10 5 90 0
cpu1 0 0 0 1000 0 0 0 0 0 0
cpu10 7 0 0 0 0 0 0 0 0 0
intr 12345 0 9
"""
BUSY = {
    "one of two": ({0: (0, 0), 1: (0, 0)}, {0: (20, 20), 1: (0, 20)}, 1.0),
    "half of each": ({0: (5, 100), 1: (9, 100)}, {0: (15, 120), 1: (19, 120)}, 1.0),
    "no tick between them": ({0: (5, 100)}, {0: (5, 100)}, 0.0),
    "a CPU that came meanwhile": ({0: (0, 0)}, {0: (10, 20), 1: (10, 20)}, 0.5),
    "nothing counted": ({}, {}, 0.0),
}


def test_only_allowed_cpus_count_and_idle_time_does_not(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    assert read_used(frozenset({0, 1}), stat) == {0: (150, 1000), 1: (0, 1000)}


def test_a_kernel_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    assert read_used(frozenset({0}), tmp_path / "stat") == {}


@pytest.mark.parametrize("case", BUSY)
def test_cpus_are_added_up(case: str) -> None:
    before, after, cpus = BUSY[case]
    assert busy(before, after) == pytest.approx(cpus)


def test_a_busy_neighbour_is_seen_while_this_process_waits() -> None:
    with neighbours([min(os.sched_getaffinity(0))]):
        look(0.5)  # the neighbour starts
        assert look(1.0) >= 0.9


def test_it_is_told_where_most_looks_saw_it() -> None:
    cpus = len(os.sched_getaffinity(0))
    assert told_of([0.0, 1.0, 1.0]) == f", beside others who used 1.0 of {cpus} CPUs"
    assert told_of([0.0, 0.0, 1.0]) == told_of([]) == ""
