"""Where a rank's time goes, and which rank or node the others wait for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.conftest import Entrypoint, needs_two_cores, script
from train.report.page import page_of
from train.report.stragglers import RankTimes, StepMeter, stragglers_text, summarize

# 10 s of training: so much for data, and so much of the main thread's CPU for the steps.
EVEN, SLOW = StepMeter(10, 1, 0.5, 6.5, 0, 100), StepMeter(10, 1, 0.5, 9.0, 0.2, 100)


def times(*meters: tuple[str, StepMeter], on_cpu: bool = True) -> list[RankTimes]:
    return [RankTimes(rank, node, meter, on_cpu) for rank, (node, meter) in enumerate(meters)]


def test_slowest_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    found = summarize(times(("a", EVEN), ("a", SLOW), ("a", EVEN)))
    assert found is not None
    assert [one["exchange_wait_ms"] for one in found["ranks"]] == [30.0, 3.2, 30.0]
    assert [one["data_ms"] for one in found["ranks"]] == [10.0] * 3
    assert (found["slowest_rank"], found["slowest_rank_cost_percent"], found["slowest_node"]) == (1, 26.8, None)
    assert stragglers_text(found) == "rank 1 on a is the slowest and costs 27 % of a step"
    assert "costs 27 % of a step" in page_of(tmp_path, {"stragglers": found})


def test_slowest_node_is_named_with_its_cost(tmp_path: Path) -> None:
    found = summarize(times(("a", EVEN), ("a", EVEN), ("<b>", SLOW), ("<b>", SLOW)))
    assert found is not None
    assert (found["slowest_node"], found["slowest_node_cost_percent"]) == ("<b>", 26.8)
    assert stragglers_text(found) == "node <b> is the slowest and costs 27 % of a step"
    assert "node &lt;b&gt; is" in page_of(tmp_path, {"stragglers": found})


def test_even_ranks_cost_nothing(tmp_path: Path) -> None:
    found = summarize(times(("a", EVEN), ("b", EVEN)))
    assert found is not None
    assert (found["slowest_rank_cost_percent"], found["slowest_node_cost_percent"]) == (0.0, 0.0)
    assert stragglers_text(found) == ""
    assert "No rank is much slower" in page_of(tmp_path, {"stragglers": found})


def test_with_gpus_only_loading_is_compared() -> None:
    late = StepMeter(10, 4, 0.5, 9.0, 0.2, 100)
    found = summarize(times(("a", EVEN), ("a", late), on_cpu=False))
    assert found is not None
    assert [one["exchange_wait_ms"] for one in found["ranks"]] == [None, None]
    assert (found["slowest_rank"], found["slowest_rank_cost_percent"]) == (1, 30.0)


@pytest.mark.parametrize("ranks", [[("a", EVEN)], [("a", EVEN), ("a", StepMeter())], []])
def test_no_stragglers_without_steps_of_other_ranks(ranks: list[tuple[str, StepMeter]]) -> None:
    assert summarize(times(*ranks)) is None
    assert stragglers_text(None) == ""


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
