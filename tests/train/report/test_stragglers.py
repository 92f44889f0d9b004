"""Where a rank's time goes, and which rank or node the others wait for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from entrypoint.machine.cpu_load import read_run_delays
from tests.conftest import Entrypoint, needs_two_cores, script
from tools.busy_processes import busy_processes
from train.report import stragglers
from train.report.page import page_of
from train.report.stragglers import CpuWaitMeter, RankTimes, StepMeter, cpu_wait_text, stragglers_text, summarize

# 10 s of training: so much for data, and so much of the main thread's CPU for the steps.
EVEN, SLOW = StepMeter(10, 1, 0.5, 6.5, 0, 100), StepMeter(10, 1, 0.5, 9.0, 0.2, 100)


def times(*meters: tuple[str, StepMeter], on_cpu: bool = True) -> list[RankTimes]:
    return [RankTimes(rank, node, meter, on_cpu) for rank, (node, meter) in enumerate(meters)]


LATE = StepMeter(10, 4, 0.5, 9.0, 0.2, 100)
# The meters of ranks on nodes, and whether they train on CPUs; then the waits in ms, the slowest rank or node and its
# cost, and what the terminal and the page say.
SLOWEST = [
    pytest.param(
        (("a", EVEN), ("a", SLOW), ("a", EVEN)), True, [30.0, 3.2, 30.0],
        {"slowest_rank": 1, "slowest_rank_cost_percent": 26.8, "slowest_node": None},
        "rank 1 on a is the slowest and costs 27 % of a step", "costs 27 % of a step", id="a rank",
    ),
    pytest.param(
        (("a", EVEN), ("a", EVEN), ("<b>", SLOW), ("<b>", SLOW)), True, [30.0, 30.0, 3.2, 3.2],
        {"slowest_node": "<b>", "slowest_node_cost_percent": 26.8}, "node <b> is the slowest and costs 27 % of a step",
        "node &lt;b&gt; is", id="a node",
    ),
    pytest.param(
        (("a", EVEN), ("b", EVEN)), True, [30.0, 30.0],
        {"slowest_rank_cost_percent": 0.0, "slowest_node_cost_percent": 0.0}, "", "No rank is much slower", id="none",
    ),
    pytest.param(
        (("a", EVEN), ("a", LATE)), False, [None, None], {"slowest_rank": 1, "slowest_rank_cost_percent": 30.0},
        "rank 1 on a is the slowest and costs 30 % of a step", "costs 30 % of a step", id="on GPUs by loading alone",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("meters", "on_cpu", "waits", "fields", "text", "shown"), SLOWEST)
def test_slowest_is_the_one_that_waits_least(
    tmp_path: Path,
    meters: tuple[tuple[str, StepMeter], ...],
    on_cpu: bool,
    waits: list[float | None],
    fields: dict[str, object],
    text: str,
    shown: str,
) -> None:
    found = summarize(times(*meters, on_cpu=on_cpu))
    assert found is not None
    assert [one["exchange_wait_ms"] for one in found["ranks"]] == waits
    assert [one["data_ms"] for one in found["ranks"]] == [10 * meter.data_s for _, meter in meters]
    assert fields.items() <= found.items()
    assert stragglers_text(found) == text
    assert shown in page_of(tmp_path, {"stragglers": found})


@pytest.mark.parametrize("ranks", [[("a", EVEN)], [("a", EVEN), ("a", StepMeter())], []])
def test_no_stragglers_without_steps_of_other_ranks(ranks: list[tuple[str, StepMeter]]) -> None:
    assert summarize(times(*ranks)) is None
    assert stragglers_text(None) == ""


@pytest.mark.seconds
def test_step_meter_tells_computing_from_waiting() -> None:
    meter = StepMeter()
    clocks = meter.start()
    with meter.loading():
        time.sleep(0.1)
    until = time.thread_time() + 0.2
    while time.thread_time() < until:
        pass
    time.sleep(0.4)  # as a rank does that waits for another one
    meter.add(clocks, 2)
    assert meter.steps == 2
    assert meter.seconds >= 0.7
    assert 0.1 <= meter.data_s <= meter.seconds - 0.6
    assert meter.cpu_s >= 0.2
    assert 0.3 <= meter.exchange_s <= meter.seconds - 0.3


SLOW_MODEL = """
    import os, time
    from torch import nn

    class Burn(nn.Module):
        def forward(self, images):
            until = time.thread_time() + (0.02 if os.environ.get("RANK") == "1" else 0)
            while time.thread_time() < until:
                pass
            return images

    def model(num_classes, in_channels, image_size):
        return nn.Sequential(Burn(), nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))
"""


@pytest.mark.launch
@needs_two_cores
def test_rank_that_computes_longer_is_named(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "slow_model.py", SLOW_MODEL)
    env = {"TRAIN_MODEL_PATH": str(entrypoint.folder)}
    words = ("--nproc-per-node=2", "--dataset=digits", "--epochs=2", "--run-name=two", "--model=slow_model:model")
    summary = entrypoint.train(*words, env=env)
    found = entrypoint.summary("two")["stragglers"]
    assert found == summary["stragglers"]
    first, second = found["ranks"]
    assert first["exchange_wait_ms"] > second["exchange_wait_ms"] + 5
    assert found["slowest_rank"] == 1
    assert found["slowest_rank_cost_percent"] > 20
    page = (entrypoint.folder / "runs/two/report.html").read_text()
    assert f"rank 1 on {second['node']} is the slowest" in page


SECOND = 1_000_000_000
SHARES = {
    "nothing counted": ({}, {}, 1.0, 0.0),
    "the longest counts": ({"1": 0, "2": 0}, {"1": SECOND // 4, "2": SECOND}, 2.0, 0.5),
    "what was before does not": ({"1": 5 * SECOND}, {"1": 6 * SECOND}, 4.0, 0.25),
    "a thread that began meanwhile": ({}, {"3": SECOND}, 10.0, 0.1),
    "one that has ended": ({"1": SECOND}, {}, 1.0, 0.0),
    "never more than all of it": ({}, {"1": 3 * SECOND}, 1.0, 1.0),
}


@pytest.mark.launch
@pytest.mark.parametrize("case", SHARES)
def test_share_is_of_longest_waiting_thread(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after, seconds, share = SHARES[case]
    meter = CpuWaitMeter()
    meter.before, meter.began = before, time.monotonic() - seconds
    monkeypatch.setattr(stragglers, "read_run_delays", lambda: after)
    assert meter.share() == pytest.approx(share, rel=0.05)


@pytest.mark.launch
def test_cpu_wait_text_large_share_names_tune() -> None:
    assert cpu_wait_text(0.19) == ""
    assert cpu_wait_text(0.376) == (
        "38 % of the time threads waited for a CPU (other processes or a CPU limit); try `entrypoint tune`"
    )


@pytest.mark.launch
def test_kernel_without_wait_counters_returns_nothing(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "schedstat").write_text("")
    assert read_run_delays(tmp_path) == {}


@pytest.fixture
def crowded() -> Iterator[None]:
    """Two busy processes on each CPU."""
    with busy_processes(sorted(os.sched_getaffinity(0)) * 2):
        yield


@pytest.mark.launch
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
