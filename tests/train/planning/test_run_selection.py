"""Plan and run select the same folder and checkpoints, or refuse them with the same line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import Entrypoint
from tests.factories import train_settings
from tests.train.checkpoint.saved import save
from tests.train.given import SMALL
from train.checkpoint.metadata import CHECKSUM_FILE
from train.planning.run_selection import check_resume, select_run_dir


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An output folder with two runs: `a` with the checkpoints 22 and 44, the best is 22, and `b` without any."""
    settings = train_settings().to_json()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text("{}")
    for step in (22, 44):
        save(tmp_path / "a/checkpoint", step, best=step == 22, settings=settings)
    (tmp_path / "latest").symlink_to("a")
    save(tmp_path / "copies", 22, settings=settings)
    return tmp_path


@pytest.mark.parametrize(
    ("fields", "folder", "steps"),
    [
        ({"run_name": "c"}, "c", []),
        ({"resume": "auto"}, "a", [44, 22]),
        ({"resume": "auto", "run_name": "a"}, "a", [44, 22]),
        ({"resume": "auto", "run_name": "c"}, "c", []),
        ({"resume": "a/checkpoint/step-000000044"}, "a", [44]),
        ({"resume": "a/checkpoint/step-000000044", "run_name": "a"}, "a", [44]),
        ({"resume": "a/checkpoint/step-000000022", "run_name": "c"}, "c", [22]),
        ({"resume": "a/checkpoint/best", "run_name": "c"}, "c", ["best"]),
        ({"resume": "copies/step-000000022", "run_name": "c"}, "c", [22]),
    ],
)
def test_run_folder_and_checkpoints_are_selected(
    output: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], folder: str, steps: list[int | str]
) -> None:
    monkeypatch.chdir(output)
    settings = train_settings(output_dir=".", **fields)
    found, starts = select_run_dir(settings)
    assert found.resolve() == output / folder
    names = [step if isinstance(step, str) else f"step-{step:09d}" for step in steps]
    assert [path.name for path in starts] == names
    check_resume(settings)


def test_copied_checkpoint_starts_a_new_run_folder(output: Path) -> None:
    found, _ = select_run_dir(train_settings(output_dir=output, resume=str(output / "copies/step-000000022")))
    assert found.parent == output
    assert not found.exists()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"run_name": "a"}, "TRAIN_RUN_NAME=a: a already holds a run"),
        ({"run_name": "b", "resume": "a/checkpoint/step-000000044"}, "TRAIN_RUN_NAME=b: b already holds a run"),
        ({"resume": "a/checkpoint/step-000000022"}, "a has a newer checkpoint, step-000000044. Set TRAIN_RUN_NAME"),
        ({"resume": "a/checkpoint/best"}, "a has a newer checkpoint, step-000000044. Set TRAIN_RUN_NAME"),
        ({"resume": "a/checkpoint"}, "TRAIN_RESUME=a/checkpoint: no such checkpoint"),
        ({"resume": "a/settings.json"}, "TRAIN_RESUME=a/settings.json: no such checkpoint"),
        ({"resume": "x" * 300}, "no such checkpoint"),
        ({"resume": "auto", "seed": 1}, "saved with other settings: TRAIN_SEED was 0, is 1"),
        ({"resume": "auto", "model": "resnet18", "resume_allow_changed": True}, "Its tensors fit no other value"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    output: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(output)
    with pytest.raises(UserError) as error:
        check_resume(train_settings(output_dir=".", **fields))
    assert said in str(error.value)


def test_corrupt_newest_checkpoint_leaves_the_older_one(output: Path) -> None:
    (output / "a/checkpoint/step-000000044" / CHECKSUM_FILE).write_text("")
    check_resume(train_settings(output_dir=output, resume="auto"))
    with pytest.raises(UserError, match="TRAIN_SEED was 0, is 1"):
        check_resume(train_settings(output_dir=output, resume="auto", seed=1))


@pytest.mark.launch
def test_plan_refuses_with_the_line_of_the_run(entrypoint: Entrypoint) -> None:
    env = SMALL | {"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "mine", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
    entrypoint.train(env=env)
    for more in ({}, {"TRAIN_RESUME": "auto", "TRAIN_SEED": "1"}, {"TRAIN_RESUME": "runs/mine/checkpoint"}):
        planned, ran = entrypoint("plan", env=env | more), entrypoint("train", env=env | more)
        assert planned.code == ran.code == 2
        assert planned.error_lines == ran.error_lines
        assert len(ran.error_lines) == 1
