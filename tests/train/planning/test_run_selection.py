"""Plan and run select the same folder and checkpoints, or refuse them with the same line."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.factories import make_machine, make_test_plan, train_settings
from tests.train.checkpoint.saved import save
from tests.train.given import SMALL
from train.checkpoint.metadata import CHECKSUM_FILE, DataFingerprint
from train.data.dataset_info import DatasetInfo
from train.planning.run_selection import check_resume, new_run_dir, previous_run, resumed_run_dir, select_run_dir
from train.settings import TrainSettings

UNKNOWN = DatasetInfo(0, (1, 8, 8))


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
    check_resume(settings, UNKNOWN)


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
        ({"resume": "a", "val_split": 0.2}, "saved with other settings: TRAIN_VAL_SPLIT was 0.0, is 0.2"),
        ({"resume": "a", "image_size": 16}, "saved with other settings: TRAIN_IMAGE_SIZE was auto, is 16"),
        ({"resume": "auto", "freeze": "backbone", "resume_allow_changed": True}, "The checkpoint fits no other value"),
        ({"resume": "auto", "normalize": "data", "resume_allow_changed": True}, "The checkpoint fits no other value"),
        ({"resume": "auto", "model": "resnet18", "resume_allow_changed": True}, "The checkpoint fits no other value"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    output: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], said: str
) -> None:
    monkeypatch.chdir(output)
    assert said in refusal(check_resume, train_settings(output_dir=".", **fields), UNKNOWN)


def test_corrupt_newest_checkpoint_leaves_the_older_one(output: Path) -> None:
    (output / "a/checkpoint/step-000000044" / CHECKSUM_FILE).write_text("")
    check_resume(train_settings(output_dir=output, resume="auto"), UNKNOWN)
    changed = train_settings(output_dir=output, resume="auto", seed=1)
    refusal(check_resume, changed, UNKNOWN, match="TRAIN_SEED was 0, is 1")


@pytest.mark.parametrize(
    ("data", "changed", "said"),
    [
        ({"classes": ("ant", "bee"), "train_images": 8}, False, ""),
        ({}, False, ""),  # what is not known is not compared
        ({"train_images": 9}, True, ""),
        ({"train_images": 9}, False, "9 training images instead of 8. Restore the data set"),
        ({"classes": ("ant", "cow")}, False, "class 1 of 2 was bee, is cow of 2. Restore the data set"),
        ({"classes": ("ant", "cow")}, True, ""),
        ({"classes": ("bee", "ant")}, True, "The model's outputs cannot be mapped to these classes"),
    ],
)
def test_other_data_than_the_checkpoints_are_refused(
    tmp_path: Path, data: dict[str, Any], changed: bool, said: str
) -> None:
    was = DataFingerprint(classes=("ant", "bee"), train_examples=8)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/settings.json").write_text("{}")
    save(tmp_path / "a/checkpoint", 22, settings=train_settings().to_json(), data=was)
    settings = train_settings(output_dir=tmp_path, resume=str(tmp_path / "a"), resume_allow_changed=changed)
    if said:
        assert said in refusal(check_resume, settings, DatasetInfo(0, (1, 8, 8), **data))
    else:
        check_resume(settings, DatasetInfo(0, (1, 8, 8), **data))


@pytest.mark.parametrize(
    ("place", "fields", "said"),
    [
        ({"epoch": 2}, {}, ""),
        ({"epoch": 2}, {"lr": 0.9}, "all steps are trained already, and TRAIN_LR was auto, is 0.9. Raise TRAIN_EPOCHS"),
        ({"epoch": 1}, {"lr": 0.9}, ""),
        ({"epoch": 3}, {}, "is after step 22, and this run ends before"),
        ({}, {"steps": 22}, "all steps are trained already, and TRAIN_STEPS was unset, is 22"),
        ({}, {"steps": 21}, "is after step 22, and this run ends with step 21"),
        ({}, {"steps": 21, "batch_size": 9}, ""),
    ],
)
def test_change_of_a_run_at_its_end_is_refused(
    tmp_path: Path, place: dict[str, int], fields: dict[str, Any], said: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/settings.json").write_text("{}")
    save(tmp_path / "a/checkpoint", 22, settings=train_settings(epochs=2).to_json(), examples=0, losses=(), **place)
    settings = train_settings(**{"output_dir": tmp_path, "resume": str(tmp_path / "a"), "epochs": 2, **fields})
    if said:
        assert said in refusal(check_resume, settings, UNKNOWN)
    else:
        check_resume(settings, UNKNOWN)


@pytest.mark.launch
def test_plan_refuses_with_the_line_of_the_run(entrypoint: Entrypoint) -> None:
    env = SMALL | {"TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "mine", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}
    entrypoint.train(env=env)
    for more in ({}, {"TRAIN_RESUME": "auto", "TRAIN_SEED": "1"}, {"TRAIN_RESUME": "runs/mine/checkpoint"}):
        assert entrypoint.error_line("plan", env=env | more) == entrypoint.error_line("train", env=env | more)


@pytest.mark.parametrize(
    ("given", "folder"),
    [
        ({}, None),
        ({"run_name": "mine"}, None),
        ({"resume": "auto"}, None),
        ({"resume": "auto", "run_name": "mine"}, "/out/mine"),
        ({"resume": "/out/mine/checkpoint/best"}, "/out/mine"),
        ({"resume": "/best"}, "/"),
    ],
)
def test_resumed_run_dir_follows_settings(given: dict[str, str], folder: str | None) -> None:
    assert resumed_run_dir(train_settings({"output_dir": "/out", **given}).run) == (Path(folder) if folder else None)


@pytest.mark.parametrize("link", [None, "gone", "old"])
def test_newest_run_is_resumed_where_no_link_leads_to_it(tmp_path: Path, link: str | None) -> None:
    for age, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").touch()
        os.utime(tmp_path / name / "settings.json", (age, age))
    if link:
        (tmp_path / "latest").symlink_to(link)
    found = resumed_run_dir(train_settings({"output_dir": tmp_path, "resume": "auto"}).run)
    assert found == tmp_path / ("latest" if link == "old" else "new")


@pytest.mark.parametrize("text", [None, "", "{}", "[]", '{"ranks": 5}', "[" * 100_000])
def test_previous_run_unreadable_plan_is_none(tmp_path: Path, text: str | None) -> None:
    settings = TrainSettings().with_values(output_dir=tmp_path, run_name="mine", resume="auto")
    (tmp_path / "mine").mkdir()
    if text is not None:
        (tmp_path / "mine/plan.json").write_text(text)
    assert previous_run(settings.run) is None
    (tmp_path / "mine/plan.json").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "mine/plan.json")  # reading it would block
    assert previous_run(settings.run) is None
    (tmp_path / "mine/plan.json").unlink()
    made = make_test_plan(make_machine(4))
    before = replace(made, binding=replace(made.binding, reserved_cpus=1))
    (tmp_path / "mine/plan.json").write_text(before.to_json())
    assert previous_run(settings.run) == before


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


@pytest.mark.usefixtures("removed_folder")
def test_odd_folders_have_no_previous_run(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for resume in ("x", "x" * 300, f"{tmp_path}/loop/checkpoint/x", f"{tmp_path}/{'x' * 300}/checkpoint/x"):
        assert previous_run(train_settings(resume=resume).run) is None
    assert new_run_dir(tmp_path / ("x" * 300), TrainSettings()).parent.name == "x" * 300
