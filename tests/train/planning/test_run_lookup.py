"""A run that goes on leaves to others what it left to them before, so that it ends the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.conftest import Entrypoint, needs_two_cores
from tests.factories import make_machine, make_test_plan, train_settings
from train.planning.run_selection import new_run_dir, previous_run, resumed_run_dir
from train.settings import TrainSettings


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, None),
        ({"run_name": "mine"}, None),
        ({"resume": "auto"}, "/out/latest"),
        ({"resume": "auto", "run_name": "mine"}, "/out/mine"),
        ({"resume": "/out/mine/checkpoint/best"}, "/out/mine"),
        ({"resume": "/best"}, "/"),
    ],
)
def test_resumed_run_dir_follows_settings(given: dict[str, str], folder: str | None) -> None:
    assert resumed_run_dir(train_settings({"output_dir": "/out", **given})) == (Path(folder) if folder else None)


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"ranks": 5}', "[" * 100_000])
def test_previous_run_unreadable_plan_is_none(tmp_path: Path, text: str | None) -> None:
    settings = TrainSettings(output_dir=tmp_path, run_name="mine", resume="auto")
    (tmp_path / "mine").mkdir()
    if text is not None:
        (tmp_path / "mine/plan.json").write_text(text)
    assert previous_run(settings) is None
    (tmp_path / "mine/plan.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "mine/plan.json")  # reading it would block
    assert previous_run(settings) is None
    (tmp_path / "mine/plan.json").unlink()
    made = make_test_plan(make_machine(4))
    before = replace(made, binding=replace(made.binding, reserved_cpus=1))
    (tmp_path / "mine/plan.json").write_text(before.to_json())
    assert previous_run(settings) == before


@pytest.mark.slow_except("0")
@needs_two_cores
@pytest.mark.launch
@pytest.mark.parametrize("left", [0, 1])
def test_resumed_run_keeps_its_threads(entrypoint: Entrypoint, left: int) -> None:
    env = {"TRAIN_DATASET": "digits", "TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "mine"}
    done = entrypoint("train", env=env | {"LAUNCH_RESERVE_CPUS": str(left)})
    assert ("1 left to other processes; LAUNCH_RESERVE_CPUS=0 uses all" in done.out) == bool(left)
    first = entrypoint.summary("mine")
    made = entrypoint.plan("train", env=env | {"TRAIN_RESUME": "auto", "LAUNCH_RESERVE_CPUS": "auto"})
    assert [rank["threads"] for rank in made["ranks"]] == [first["threads"]]
    assert made["binding"]["reserved_cpus"] == left
    why = next(one["reason"] for one in made["decisions"] if one["key"] == "threads")
    assert ("same as in the run being resumed" in why) == bool(left)


def test_odd_folders_have_no_previous_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for resume in ("x", "x" * 300, f"{tmp_path}/loop/checkpoint/x", f"{tmp_path}/{'x' * 300}/checkpoint/x"):
        assert previous_run(train_settings(resume=resume)) is None
    assert new_run_dir(tmp_path / ("x" * 300), TrainSettings()).parent.name == "x" * 300
