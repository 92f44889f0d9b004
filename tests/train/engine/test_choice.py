"""Which images choose the best checkpoint, and when a run stops because they no longer improve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import Entrypoint, needs_two_cores, paint, refusal
from tests.factories import train_settings
from tests.train.given import TWO_RANKS, epochs_of, imagefolder, losses
from train.data.dataset_info import inspect_dataset
from train.data.sources.image_folder import list_splits
from train.data.val_split import TEST, behind_test, cut_from_training
from train.models.state_dict_file import read_state_dict

QUIET = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}


def test_cut_takes_a_fraction_of_each_class() -> None:
    labels = [0] * 50 + [1] * 20 + [2] * 3 + [3]
    rows = cut_from_training(labels, 0.1, seed=3)
    assert rows.train is not None
    assert rows.val is not None
    assert sorted([*rows.train.tolist(), *rows.val.tolist()]) == list(range(len(labels)))
    assert torch.bincount(torch.tensor(labels)[rows.val], minlength=4).tolist() == [5, 2, 1, 0]
    assert torch.equal(rows.val, cut_from_training(labels, 0.1, seed=3).val)
    assert not torch.equal(rows.val, cut_from_training(labels, 0.1, seed=4).val)


def test_rows_behind_test_know_what_is_left_out() -> None:
    rows = behind_test(8, 5, left_out=[1, 6])
    assert rows.train is None
    assert rows.test is not None
    assert rows.val is not None
    assert (rows.test.tolist(), rows.val.tolist(), rows.val_is_in) == ([0, 1, 2, 3], [4, 5], TEST)


@pytest.fixture
def three_splits(image_folder: Path) -> Path:
    """Return a folder with train/, val/ and test/; the images of val/ are other ones."""
    shutil.copytree(image_folder / "train", image_folder / "val")
    for index, path in enumerate(sorted((image_folder / "val").rglob("*.*"))):
        if index % 2:
            path.unlink()
    return image_folder


def test_val_folder_is_listed_behind_test(three_splits: Path) -> None:
    _, test = list_splits(three_splits)
    assert (len(test), test.val_start) == (24, 12)
    assert {path.parent.parent.name for path in list(test.files)[:12]} == {"test"}
    assert {path.parent.parent.name for path in list(test.files)[12:]} == {"val"}
    settings = train_settings(dataset="imagefolder", data_dir=three_splits)
    found = inspect_dataset(settings)
    assert (found.images, found.train_images, found.has_val) == (48, 24, True)
    (three_splits / "val/class1").rename(three_splits / "val/zebra")
    for look in (list_splits, lambda _: inspect_dataset(settings)):
        refusal(look, three_splits, match=r"classes differ, only in train/: class1; only in val/: zebra")


def test_flat_test_folder_of_imagenet_is_passed_over(three_splits: Path) -> None:
    shutil.rmtree(three_splits / "test")
    (three_splits / "test").mkdir()
    (three_splits / "test/ILSVRC2012_test_00000001.JPEG").write_bytes(b"x")
    _, test = list_splits(three_splits)
    assert (len(test), test.val_start) == (12, None)
    assert not inspect_dataset(train_settings(dataset="imagefolder", data_dir=three_splits)).has_val


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.launch
def test_scores_of_before_the_pruning_choose_and_stop_nothing(entrypoint: Entrypoint, three_splits: Path) -> None:
    pruned = {"TRAIN_PRUNE_RATIO": "0.9", "TRAIN_PRUNE_WARMUP": "3", "TRAIN_EPOCHS": "4", "TRAIN_LR": "1e-9"}
    env = imagefolder(three_splits, TRAIN_MODEL="cnn", **pruned) | QUIET
    result = entrypoint.succeed("train", "--run-name=a", "--early-stopping=1", env=env)
    assert "pruned: " in result.out
    found, epochs = entrypoint.summary("a"), epochs_of(entrypoint, "a")
    assert len(epochs) == 4
    assert found["best_accuracy"] == pytest.approx(epochs[-1]["val_accuracy"], abs=1e-4)


@pytest.mark.launch
@pytest.mark.parametrize("decays", [("0", "0.9"), ("0.9", "0")])
def test_scores_of_other_weights_choose_nothing(entrypoint: Entrypoint, decays: tuple[str, str]) -> None:
    """The run's best checkpoint has no averaged weights, or only these were scored."""
    env = QUIET | {"TRAIN_VAL_SPLIT": "0.2", "TRAIN_RUN_NAME": "a"}
    entrypoint.succeed("train", "--epochs=2", f"--ema-decay={decays[0]}", env=env)
    later = ("train", "--resume=runs/a", "--epochs=3", "--lr=2", f"--ema-decay={decays[1]}")
    entrypoint.succeed(*later, env=QUIET)
    summary = entrypoint.summary("a")
    assert (summary["best_accuracy"], summary["best_epoch"]) == (summary["val_accuracy"], None)


@pytest.mark.slow
@pytest.mark.launch
def test_best_weights_of_another_run_stay_in_it(entrypoint: Entrypoint, three_splits: Path) -> None:
    env = imagefolder(three_splits, TRAIN_EPOCHS="3", TRAIN_KEEP_CHECKPOINTS="9") | QUIET
    entrypoint.train("--run-name=a", env=env)
    first = sorted((entrypoint.folder / "runs/a/checkpoint").glob("step-*"))[0]
    result = entrypoint.succeed("train", "--run-name=b", env=env | {"TRAIN_RESUME": str(first)})
    assert "resuming although the best checkpoint stays in " in result.out
    assert "cannot be read" not in result.out + result.err
    assert entrypoint.summary("b")["best_accuracy"] == pytest.approx(
        max(line["val_accuracy"] for line in epochs_of(entrypoint, "b")), abs=1e-4
    )


@pytest.mark.slow_except("stream")
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_val_folder_chooses_and_test_is_told_apart(entrypoint: Entrypoint, three_splits: Path, source: str) -> None:
    env = imagefolder(three_splits, TRAIN_DATA_SOURCE=source) | QUIET
    entrypoint.train("--run-name=a", env=env)
    found = entrypoint.summary("a")
    assert (found["best_chosen_on"], found["val_images"], found["test_images"]) == ("val", 12, 12)
    epochs = epochs_of(entrypoint, "a")
    assert all("val_accuracy" in line and "test_accuracy" not in line for line in epochs)
    assert found["best_accuracy"] == pytest.approx(max(line["val_accuracy"] for line in epochs), abs=1e-4)
    again = json.loads(entrypoint.succeed("evaluate", "runs/a", "--json", env=QUIET).out)
    assert again["accuracy"] == pytest.approx(found["test_accuracy"], abs=1e-4)


@pytest.mark.launch
@needs_two_cores
@pytest.mark.slow_except("ddp")
@pytest.mark.parametrize(
    "env", [{}, {"TRAIN_EMA_DECAY": "0.5"}, {"TRAIN_PARALLELISM": "fsdp"}], ids=["ddp", "EMA", "fsdp"]
)
def test_run_leaves_the_weights_that_val_chose(entrypoint: Entrypoint, three_splits: Path, env: dict[str, str]) -> None:
    """The images are easy: some epoch has no mistake, and none after it is better."""
    more = {"TRAIN_EPOCHS": "8", "TRAIN_EXPORT": "onnx"} | TWO_RANKS | QUIET | env
    result = entrypoint.succeed("train", "--run-name=a", env=imagefolder(three_splits, **more))
    found, run = entrypoint.summary("a"), entrypoint.folder / "runs/a"
    assert found["best_accuracy"] == found["val_accuracy"]
    assert 0 < found["best_epoch"] < 8
    assert f"after epoch {found['best_epoch']}, whose weights these are" in result.out
    best = next(line for line in epochs_of(entrypoint, "a") if line["epoch"] == found["best_epoch"])
    assert found["val_loss"] == pytest.approx(best["val_loss"], rel=1e-4)
    last = {"TRAIN_RESUME": "auto", "TRAIN_RUN_NAME": "a"}
    entrypoint.succeed("train", env=imagefolder(three_splits, **more) | last)
    assert entrypoint.summary("a")["weights_sha256"] == found["weights_sha256"]
    kept = read_state_dict(run / "model.safetensors")
    section = "ema" if "TRAIN_EMA_DECAY" in env else "model"
    if "TRAIN_PARALLELISM" not in env:
        saved = read_state_dict(run / f"checkpoint/best/{section}.safetensors")
        assert all(torch.equal(value, saved[name]) for name, value in kept.items())


@pytest.mark.launch
@pytest.mark.parametrize(("evaluated", "saved"), [("1", "4"), ("3", "2"), ("2", "3")])
def test_best_is_that_of_all_evaluations(
    entrypoint: Entrypoint, three_splits: Path, evaluated: str, saved: str
) -> None:
    env = {"TRAIN_EVAL_EVERY": evaluated, "TRAIN_CHECKPOINT_EVERY": saved, "TRAIN_EPOCHS": "6"}
    entrypoint.train("--run-name=a", "--max-grad-norm=1", env=imagefolder(three_splits, **env) | QUIET)
    seen = [line["val_accuracy"] for line in epochs_of(entrypoint, "a") if "val_accuracy" in line]
    found = entrypoint.summary("a")
    assert found["best_accuracy"] == pytest.approx(max(seen), abs=1e-4)
    assert found["best_accuracy"] == found["val_accuracy"], "the run leaves these weights"


@pytest.mark.launch
@needs_two_cores
@pytest.mark.slow_except("memory")
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_cut_images_are_the_same_on_any_number_of_ranks(
    entrypoint: Entrypoint, image_folder: Path, source: str
) -> None:
    env = (
        imagefolder(image_folder, TRAIN_DATA_SOURCE=source, TRAIN_VAL_SPLIT="0.25", TRAIN_NORMALIZE="imagenet") | QUIET
    )
    entrypoint.train("--run-name=one", env=env)
    entrypoint.train("--run-name=two", env=env | TWO_RANKS)
    one, two = (entrypoint.summary(name) for name in ("one", "two"))
    ranks = json.loads((entrypoint.folder / "runs/two/ranks.json").read_text())
    assert [(rank["cpus"], rank["threads"]) for rank in ranks] == [
        (rank["cpus"], rank["threads"]) for rank in entrypoint.plan(env=TWO_RANKS)["ranks"]
    ]
    assert one["val_images"] == two["val_images"] == 6
    assert one["steps"] == 2 * (18 // 8)
    assert losses(entrypoint, "two") == pytest.approx(losses(entrypoint, "one"), rel=1e-4)
    assert two["val_loss"] == pytest.approx(one["val_loss"], rel=1e-3)


@pytest.mark.launch
def test_run_without_improvement_stops_and_stays_stopped(entrypoint: Entrypoint) -> None:
    env = QUIET | {
        "TRAIN_VAL_SPLIT": "0.2", "TRAIN_EARLY_STOPPING": "2", "TRAIN_EPOCHS": "30", "TRAIN_LR": "1e-12",
        "TRAIN_CHECKPOINT_EVERY": "10", "TRAIN_RUN_NAME": "a",
    }  # fmt: skip
    result = entrypoint.succeed("train", env=env)
    assert "stopping early: val accuracy has not improved for 2 epochs" in result.out
    found = entrypoint.summary("a")
    assert found["epochs"] == 3
    entrypoint.succeed("train", env=env | {"TRAIN_RESUME": "auto"})
    assert entrypoint.summary("a")["steps"] == found["steps"]


@pytest.mark.launch
def test_split_that_cannot_choose_is_refused(entrypoint: Entrypoint, three_splits: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        paint(tmp_path / "few" / split, each=1)
    few = imagefolder(tmp_path / "few", TRAIN_VAL_SPLIT="0.3", TRAIN_BATCH_SIZE="2")
    both = imagefolder(three_splits, TRAIN_VAL_SPLIT="0.1")
    for env, said in (
        (few, "TRAIN_VAL_SPLIT=0.3: leaves no image to choose by"),
        (both, "TRAIN_VAL_SPLIT=0.1: the folder has val/ next to test/"),
    ):
        for command in ("plan", "train"):
            assert said in entrypoint.error_line(command, env=env | QUIET)


@pytest.mark.launch
def test_evaluation_every_few_epochs_and_at_the_end(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(image_folder, TRAIN_EPOCHS="5", TRAIN_CHECKPOINT_EVERY="1")
    entrypoint.train(env=env | {"TRAIN_RUN_NAME": "each", "TRAIN_EVAL_EVERY": "1"})
    summary = entrypoint.train(env=env | {"TRAIN_RUN_NAME": "some", "TRAIN_EVAL_EVERY": "2"})
    lines = {name: epochs_of(entrypoint, name) for name in ("each", "some")}
    assert [line["epoch"] for line in lines["some"] if "test_accuracy" in line] == [2, 4, 5]
    for one, other in zip(lines["each"], lines["some"], strict=True):
        assert one["train_loss"] == other["train_loss"]
        assert other.get("test_loss", one["test_loss"]) == one["test_loss"]
    assert summary["best_accuracy"] == max(line.get("test_accuracy", 0) for line in lines["some"])
    assert summary["weights_sha256"] == entrypoint.summary("each")["weights_sha256"]


@pytest.mark.launch
def test_early_stopping_counts_epochs_between_evaluations(entrypoint: Entrypoint, image_folder: Path) -> None:
    env = imagefolder(image_folder, TRAIN_EPOCHS="20", TRAIN_LR="1e-9", TRAIN_EARLY_STOPPING="4", **QUIET)
    summary = entrypoint.train(env=env | {"TRAIN_EVAL_EVERY": "2"})
    assert summary["epochs"] == 6
    assert len([line for line in epochs_of(entrypoint, "latest") if "test_loss" in line]) == 3
