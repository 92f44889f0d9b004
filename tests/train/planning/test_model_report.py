"""Questions to the process that builds the model: any text of an environment reaches it, and its answer is kept."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.conftest import Entrypoint, refusal
from tests.train.given import SMALL
from train.planning import model_report
from train.planning.model_report import ModelQuestion, ModelReport, ask_about_model, needs_report
from train.settings import ImageShape, read_train_settings

QUESTION = ModelQuestion(shape=(3, 32, 32), classes=("a", "b"))


@pytest.mark.launch
def test_weights_with_a_name_of_other_bytes_are_loaded(entrypoint: Entrypoint) -> None:
    entrypoint.train(env=SMALL | {"TRAIN_RUN_NAME": "first", "TRAIN_STEPS": "1"})
    name = os.fsdecode(b"\xff-weights.safetensors")
    (entrypoint.folder / "runs/first/model.safetensors").rename(entrypoint.folder / name)
    result = entrypoint.succeed(
        "train", env=SMALL | {"TRAIN_WEIGHTS": name, "TRAIN_STEPS": "1", "TRAIN_RUN_NAME": "second"}
    )
    assert "all weights" in result.err or "weights " in result.err


@pytest.mark.parametrize(
    ("environ", "shape", "needed"),
    [
        ({}, (3, 32, 32), False),
        ({}, (3, 224, 224), True),
        ({"TRAIN_MODEL": "speednet", "TRAIN_OPTIMIZER": "adamw"}, (3, 32, 32), False),
        ({"TRAIN_MODEL": "resnet18"}, (3, 32, 32), True),
        ({"TRAIN_OPTIMIZER": "rmsprop"}, (3, 32, 32), True),
        ({"TRAIN_OPTIMIZER_ARGS": "dampening=0"}, (3, 32, 32), True),
        ({"TRAIN_WEIGHTS": "x.pth"}, (3, 32, 32), True),
    ],
)
def test_usual_settings_start_no_process(environ: dict[str, str], shape: ImageShape, needed: bool) -> None:
    assert needs_report(read_train_settings(environ, {}), shape) is needed


def test_answer_is_kept_by_settings_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ModelReport(parameters=1), ModelReport(parameters=2), ModelReport(parameters=3)])
    monkeypatch.setattr(model_report, "run_probe", lambda *_: next(answers))

    def parameters(environ: dict[str, str], torch: str = "2.15.0", cache: Path | None = tmp_path) -> int:
        given = read_train_settings(environ, {})
        return ask_about_model(given, {}, QUESTION, sys.executable, {"torch": torch}, cache).parameters

    resnet = {"TRAIN_MODEL": "resnet18"}
    assert parameters(resnet) == 1
    assert parameters(resnet | {"TRAIN_RUN_NAME": "another", "TRAIN_EPOCHS": "2"}) == 1
    assert parameters(resnet, torch="2.8.0") == 2
    (tmp_path / "models").rename(tmp_path / "moved")
    assert parameters(resnet) == 3
    for file in (tmp_path / "models").iterdir():
        file.write_text("{")
    with pytest.raises(StopIteration):  # a damaged answer is asked for again
        parameters(resnet)


@pytest.mark.parametrize(
    "environ", [{"TRAIN_MODEL": "resnet18", "TRAIN_WEIGHTS": "x.pth"}, {"TRAIN_MODEL": "mine:net"}]
)
def test_answer_that_files_can_change_is_not_kept(
    environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_report, "run_probe", lambda *_: ModelReport())
    ask_about_model(read_train_settings(environ, {}), {}, QUESTION, sys.executable, {}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.launch
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TRAIN_OPTIMIZER": "adamv"}, r"TRAIN_OPTIMIZER=adamv: no such optimizer\. Did you mean adam"),
        ({"TRAIN_OPTIMIZER_ARGS": "dampening"}, "dampening has no value"),
    ],
)
def test_what_the_child_refuses_is_one_line(environ: dict[str, str], said: str, tmp_path: Path) -> None:
    refusal(ask_about_model, read_train_settings(environ, {}), {}, QUESTION, sys.executable, {}, tmp_path, match=said)
    assert list(tmp_path.iterdir()) == []
