"""Runs that learn several labels an image, or numbers: on ranks, resumed, evaluated and used."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from tests.conftest import Entrypoint, needs_two_cores
from tests.train.data.shard_files import pack_lists
from tests.train.given import TWO_RANKS, imagefolder, losses

pytestmark = pytest.mark.launch
QUIET = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}
CELLS = {
    "multilabel": {"class0": "a", "class1": "a|b", "class2": ""},
    "regress": {"class0": "10", "class1": "12.5", "class2": "20"},
}


@pytest.fixture(params=["multilabel", "regress"])
def task(request: pytest.FixtureRequest, image_folder: Path) -> dict[str, str]:
    """Return the settings of a run on painted images whose color decides on the labels, or on a number."""
    for split in ("train", "test", "val"):
        folder = image_folder / ("test" if split == "val" else split)
        paths = sorted(folder.rglob("*.*"))[:: 3 if split == "val" else 1]
        rows = [f"{path.relative_to(image_folder)},{CELLS[request.param][path.parent.name]}" for path in paths]
        (image_folder / f"{split}.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    given = {"TRAIN_DATASET": "csv", "TRAIN_DATA_DIR": str(image_folder), "TRAIN_TASK": request.param}
    return (
        QUIET
        | imagefolder(image_folder)
        | given
        | {"TRAIN_EPOCHS": "6", "TRAIN_RUN_NAME": "run", "TRAIN_MIXUP_ALPHA": "0.2"}
    )


def test_task_is_learned_and_used(entrypoint: Entrypoint, task: dict[str, str], image_folder: Path) -> None:
    done = entrypoint.succeed("train", env=task | {"TRAIN_EXPORT": "onnx"})
    summary = entrypoint.summary("run")
    score = {"multilabel": "mAP", "regress": "R2"}[task["TRAIN_TASK"]]
    assert summary["score"] == score
    assert summary[f"test_{score}"] > 60
    assert f"test {score}" in done.out
    assert "accuracy" not in done.out
    assert f"test {score}" in (entrypoint.folder / "runs/run/report.html").read_text()
    evaluated = entrypoint("evaluate", "runs/run", env={"LAUNCH_QUIET": "1"})
    assert f"{score:9} {summary[f'test_{score}']:.2f} %" in evaluated.out, evaluated.err
    named = entrypoint("evaluate", "runs/run", "--data-dir", str(image_folder), env={"LAUNCH_QUIET": "1"})
    assert named.out == evaluated.out, named.err
    images = sorted(map(str, (image_folder / "test").rglob("*.*")))
    predicted = entrypoint("predict", "--format", "json", "runs/run", *images)
    answers = {one["file"]: one["predictions"] for one in json.loads(predicted.out)}
    assert len(answers) == len(images)
    if score == "R2":
        with (image_folder / "test.csv").open() as file:
            errors = [
                abs(answers[str(image_folder / row["file"])][0]["value"] - float(row["label"]))
                for row in csv.DictReader(file)
            ]
        assert sum(errors) / len(errors) == pytest.approx(summary["test_mae"], rel=1e-3)


@needs_two_cores
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_ranks_and_resumption_change_nothing(entrypoint: Entrypoint, task: dict[str, str], source: str) -> None:
    task |= {"TRAIN_DATA_SOURCE": source, "TRAIN_EPOCHS": "2"}
    one = entrypoint.train(env=task | {"TRAIN_KEEP_CHECKPOINTS": "9"})
    two = entrypoint.train(env=task | TWO_RANKS | {"TRAIN_RUN_NAME": "two"})
    score = f"test_{one['score']}"
    assert one[score] == pytest.approx(two[score], abs=0.1)
    assert losses(entrypoint, "run") == pytest.approx(losses(entrypoint, "two"), rel=1e-3)
    entrypoint.cut()
    assert entrypoint.train(env=task | {"TRAIN_RESUME": "auto"})["weights_sha256"] == one["weights_sha256"]


@needs_two_cores
def test_shards_train_what_a_csv_trains(entrypoint: Entrypoint, task: dict[str, str], image_folder: Path) -> None:
    task |= TWO_RANKS | {"TRAIN_DATA_SOURCE": "stream", "TRAIN_EPOCHS": "2"}
    packed = pack_lists(image_folder, entrypoint.folder / "packed", task["TRAIN_TASK"])
    one = entrypoint.train(env=task)
    two = entrypoint.train(
        env=task | {"TRAIN_DATASET": "shards", "TRAIN_DATA_DIR": str(packed), "TRAIN_RUN_NAME": "two"}
    )
    assert (two["weights_sha256"], two["score"]) == (one["weights_sha256"], one["score"])


@needs_two_cores
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_balanced_and_weighted_classes_are_the_same_on_ranks(
    entrypoint: Entrypoint, image_folder: Path, source: str
) -> None:
    for path in sorted((image_folder / "train/class0").iterdir())[1:]:
        path.unlink()
    given = {"TRAIN_DATA_SOURCE": source, "TRAIN_LOSS": "focal", "TRAIN_CLASS_WEIGHTS": "class1=2"}
    env = QUIET | imagefolder(image_folder) | given | {"TRAIN_BALANCE": "1"}
    entrypoint.train("--run-name=one", env=env)
    entrypoint.train("--run-name=two", env=env | TWO_RANKS)
    entrypoint.train("--run-name=plain", env=env | {"TRAIN_BALANCE": "0"})
    assert losses(entrypoint, "one") == pytest.approx(losses(entrypoint, "two"), rel=1e-3)
    assert losses(entrypoint, "one") != pytest.approx(losses(entrypoint, "plain"), rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"TRAIN_TASK": "multilabel", "TRAIN_DATASET": "digits"},
            "TRAIN_TASK=multilabel: the labels stand in train.csv",
        ),
        ({"TRAIN_LOSS": "mse"}, "TRAIN_LOSS=mse: is no loss of TRAIN_TASK=classify. Use cross_entropy, bce, focal."),
        ({"TRAIN_CLASS_WEIGHTS": "10=2"}, "TRAIN_CLASS_WEIGHTS=10=2: there is no class 10."),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_setting_of_another_task_is_refused(entrypoint: Entrypoint, command: str, settings: dict, said: str) -> None:
    assert said in entrypoint.error_line(command, env=QUIET | settings)
