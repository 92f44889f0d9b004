"""How much of this process's CPUs others use: by the kernel's count, and next to real ones."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from entrypoint.machine.cpu_load import (
    IDLE_COLUMNS,
    STEAL_COLUMN,
    busy_cpus_between,
    other_busy_cpus,
    own_cpu_seconds,
    read_cpu_ticks,
    take_sample,
)
from tests.conftest import CORES, PYTHON, Entrypoint, needs_two_cores, script
from tests.processes import with_high_load
from tools.busy_processes import busy_processes

pytestmark = pytest.mark.launch

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


def sample_busy_cpus(seconds: float) -> float:
    """Return how many of this process's CPUs other processes use while it sleeps."""
    cpus = frozenset(os.sched_getaffinity(0))
    before = read_cpu_ticks(cpus)
    time.sleep(seconds)
    return busy_cpus_between(before, read_cpu_ticks(cpus))


def test_read_cpu_ticks_skips_idle_and_other_cpus(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    assert read_cpu_ticks(frozenset({0, 1}), stat) == {0: (150, 1000), 1: (0, 1000)}
    assert read_cpu_ticks(frozenset({0}), stat, (*IDLE_COLUMNS, STEAL_COLUMN)) == {0: (145, 1000)}


def test_kernel_without_wait_counters_returns_nothing(tmp_path: Path) -> None:
    assert read_cpu_ticks(frozenset({0}), tmp_path / "stat") == {}


@pytest.mark.parametrize("case", BUSY)
def test_busy_cpus_between_sums_cpus(case: str) -> None:
    before, after, cpus = BUSY[case]
    assert busy_cpus_between(before, after) == pytest.approx(cpus)


def load_of(monkeypatch: pytest.MonkeyPatch, load: float | None) -> None:
    """Let the kernel say this one-minute load average, None where /proc hides it."""

    def averages() -> tuple[float, float, float]:
        if load is None:
            raise OSError("Load averages are unobtainable")
        return (load, 0.0, 0.0)

    monkeypatch.setattr(os, "getloadavg", averages)


@pytest.mark.parametrize(("load", "least", "most"), [(9.0, 0.8, CORES), (0.31, 0, 0), (None, 0, 0)])
def test_other_busy_cpus_counts_lasting_load(
    monkeypatch: pytest.MonkeyPatch, load: float | None, least: float, most: float
) -> None:
    load_of(monkeypatch, load)
    with busy_processes([min(os.sched_getaffinity(0))]):
        sample_busy_cpus(0.5)  # it starts
        since = take_sample()
        time.sleep(1.0)
        assert least <= other_busy_cpus(since) <= most


def test_other_busy_cpus_excludes_own_use(monkeypatch: pytest.MonkeyPatch) -> None:
    load_of(monkeypatch, 9.0)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # of one CPU it and other suites cannot both have much
    try:
        since, before = take_sample(), time.process_time()
        while time.process_time() - before < 0.5:
            pass
        own = (own_cpu_seconds() - since.own_s) / (time.monotonic() - since.clock_s)
        assert other_busy_cpus(since) <= 1.1 - own
    finally:
        os.sched_setaffinity(0, allowed)


@needs_two_cores
@pytest.mark.launch
def test_run_on_busy_node_uses_fewer_threads(entrypoint: Entrypoint, tmp_path: Path) -> None:
    program = script(tmp_path, "x.py", "import os; print('threads', os.environ['OMP_NUM_THREADS'])")
    command = (*with_high_load(tmp_path), PYTHON, "-m", "entrypoint")
    calm = 0
    with busy_processes([min(os.sched_getaffinity(0))]):
        for _ in range(9):  # other suites may use CPUs too, for a moment
            before = sample_busy_cpus(0.5)
            done = entrypoint("run", program, env={"LAUNCH_RESERVE_CPUS": "auto"}, command=command)
            if done.out == f"threads {CORES - 1}\n":
                break
            calm += max(before, sample_busy_cpus(0.5)) < 1.3
            assert calm < 3, done.out + done.err
        else:
            pytest.skip(f"needs a machine with nobody else on it, others use {before:.1f} of {CORES} CPUs")
    assert "less: other processes use " in done.err
