"""How long threads waited for a CPU: counted by the kernel, reported where it is worth it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.machine.cpu_load import read_run_delays
from tools.busy_processes import busy_processes
from train.report import stragglers
from train.report.stragglers import CpuWaitMeter, cpu_wait_text

pytestmark = pytest.mark.launch

SECOND = 1_000_000_000
SHARES = {
    "nothing counted": ({}, {}, 1.0, 0.0),
    "the longest counts": ({"1": 0, "2": 0}, {"1": SECOND // 4, "2": SECOND}, 2.0, 0.5),
    "what was before does not": ({"1": 5 * SECOND}, {"1": 6 * SECOND}, 4.0, 0.25),
    "a thread that began meanwhile": ({}, {"3": SECOND}, 10.0, 0.1),
    "one that has ended": ({"1": SECOND}, {}, 1.0, 0.0),
    "never more than all of it": ({}, {"1": 3 * SECOND}, 1.0, 1.0),
}


@pytest.mark.parametrize("case", SHARES)
def test_share_is_of_longest_waiting_thread(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, seconds, share = SHARES[case]
    meter = CpuWaitMeter()
    meter.before, meter.began = before, time.monotonic() - seconds
    monkeypatch.setattr(stragglers, "read_run_delays", lambda: after)
    assert meter.share() == pytest.approx(share, rel=0.05)


def test_cpu_wait_text_large_share_names_tune() -> None:
    assert cpu_wait_text(0.19) == ""
    assert cpu_wait_text(0.376) == (
        "38 % of the time threads waited for a CPU (other processes or a CPU limit); try `entrypoint tune`"
    )


def test_kernel_without_wait_counters_returns_nothing(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("")
    assert read_run_delays(tmp_path) == {}


@pytest.fixture
def crowded() -> Iterator[None]:
    """Two busy processes on each CPU."""
    with busy_processes(sorted(os.sched_getaffinity(0)) * 2):
        yield


@pytest.mark.usefixtures("crowded")
def test_busy_thread_waits_for_a_cpu_and_a_sleeping_one_does_not() -> None:
    waiting, until = CpuWaitMeter(), time.monotonic() + 2
    sleeping = threading.Event()
    sleeper = threading.Thread(target=sleeping.wait)
    sleeper.start()
    while time.monotonic() < until:
        pass
    waits = read_run_delays()
    sleeping.set()
    assert waiting.share() > 0.2
    assert waits[str(sleeper.native_id)] < SECOND // 2
