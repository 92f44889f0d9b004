"""A profile of a few steps: files, and the share of each phase."""

from __future__ import annotations

import json

import pytest

from tests.conftest import Entrypoint
from train.report.profiler import PHASES


@pytest.mark.slow
@pytest.mark.launch
def test_run_that_ends_before_its_profile_says_so(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_STEPS": "20", "TRAIN_RUN_NAME": "seen", "TRAIN_RESUME": "auto", "TRAIN_TENSORBOARD": "0"}
    assert entrypoint("train", env=env).code == 0
    env |= {"TRAIN_PROFILE": "5", "TRAIN_RESUME_ALLOW_CHANGED": "1", "LAUNCH_QUIET": "1"}
    for steps, left in (("20", 0), ("27", 7)):
        result = entrypoint.succeed("train", env=env | {"TRAIN_STEPS": steps})
        assert f"TRAIN_PROFILE=5 wrote no profile: it needs 10 steps, and {left} were left" in result.out + result.err
    assert not (entrypoint.folder / "runs/seen/profile").exists()


@pytest.mark.versions
@pytest.mark.launch
def test_profiled_run_continues_training(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_EPOCHS": "1", "TRAIN_PROFILE": "4", "TRAIN_TENSORBOARD": "0"}
    result = entrypoint.succeed("train", env=env | {"TRAIN_RUN_NAME": "seen"})
    folder = entrypoint.folder / "runs/seen/profile"
    operators = (folder / "operators.txt").read_text()
    assert "aten::mkldnn_convolution" in operators or "aten::convolution" in operators
    assert "Self CPU %" in operators
    phases = json.loads((folder / "phases.json").read_text())
    assert phases["steps"] == 4
    assert sum(phases["shares"].values()) == pytest.approx(1, abs=0.01)
    assert all(phases["seconds"][name] > 0 for name in PHASES)
    marks = [one["name"] for one in json.loads((folder / "trace.json").read_text())["traceEvents"]]
    assert marks.count("step: optimizer") == 4
    assert f"profile of 4 steps: data {100 * phases['shares']['data']:.0f} %, forward and loss " in result.out

    plain = entrypoint.train(env={"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "plain"})
    assert entrypoint.summary("seen")["test_loss"] == plain["test_loss"], "looking changes nothing"
