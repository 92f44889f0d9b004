"""What a run says in the end: its accuracy, the digest of its weights, and the files of mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, needs_two_cores
from tests.factories import train_settings
from tests.train.given import TWO_RANKS, imagefolder
from train.checkpoint.folder import newest
from train.checkpoint.metadata import read_metadata
from train.data.datasets import ImageTensors, load_digits
from train.engine.finish import weights_sha256
from train.models.cnn import CNN


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_digest_depends_on_values_and_names_only() -> None:
    one = model()
    assert weights_sha256(one.state_dict()) == weights_sha256(model().state_dict())
    last = model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert weights_sha256(last.state_dict()) == weights_sha256(one.state_dict())
    with torch.no_grad():
        one[0].weight[0, 0, 0, 0] += 1e-7  # type: ignore[index]
    assert weights_sha256(one.state_dict()) != weights_sha256(model().state_dict())
    assert weights_sha256(nn.Sequential(model()[0]).state_dict()) != weights_sha256(model().state_dict())  # type: ignore[index]


@pytest.mark.launch
def test_last_step_that_breaks_a_weight_fails(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_LR": "1e308", "TRAIN_STEPS": "1", "TRAIN_CHECKPOINT_EVERY": "0", "LAUNCH_QUIET": "1"}
    assert "is not finite. Lower TRAIN_LR" in entrypoint.error_line("train", env=env, code=ExitCode.RANK_FAILED)


@pytest.mark.launch
@pytest.mark.parametrize(
    "more",
    [
        {"TRAIN_DATA_SOURCE": "memory"},
        pytest.param({"TRAIN_DATA_SOURCE": "stream", **TWO_RANKS}, marks=needs_two_cores),
        {"TRAIN_DATA_SOURCE": "memory", "TRAIN_VAL_SPLIT": "0.2"},
    ],
)
def test_mistakes_name_their_files(entrypoint: Entrypoint, image_folder: Path, more: dict[str, str]) -> None:
    env = imagefolder(image_folder, TRAIN_EPOCHS="1", TRAIN_LR="1e-6", TRAIN_RUN_NAME="run", TRAIN_TENSORBOARD="0")
    assert entrypoint("train", env=env | more).code == 0
    mistakes = json.loads((entrypoint.folder / "runs/run/evaluation.json").read_text())["mistakes"]
    assert mistakes, "nothing is learned at this rate"
    for mistake in mistakes:
        assert Path(mistake["file"]).parent.name == mistake["class"]
        assert Path(mistake["file"]).parent.parent == image_folder / "test"
    assert mistakes[0]["file"] in (entrypoint.folder / "runs/run/report.html").read_text()


QUIET = {"LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0", "TRAIN_EPOCHS": "2"}


def count_right(checkpoint: Path, file: str, prefix: str) -> tuple[int, int]:
    """Return how many test images the weights in a file of a checkpoint classify right, and how many there are."""
    test = load_digits(train_settings()).test
    assert isinstance(test, ImageTensors)
    model = CNN((1, 8, 8), 10, bias=True)
    saved = load_file(checkpoint / file)
    model.load_state_dict({name.removeprefix(prefix): one for name, one in saved.items() if name.startswith(prefix)})
    normalization = read_metadata(checkpoint)[0].normalization
    assert normalization is not None
    pixels = (test.images.permute(0, 3, 1, 2).float() - normalization.mean[0]) * normalization.scale[0]
    model.eval()
    with torch.no_grad():
        chosen = [int(model(one[None]).argmax()) for one in pixels]
    return sum(one == label for one, label in zip(chosen, test.labels.tolist(), strict=True)), len(test)


@pytest.mark.launch
@pytest.mark.slow_except("more1")
@pytest.mark.parametrize(
    ("more", "file", "prefix"),
    [
        ({}, "model.safetensors", ""),
        ({"LAUNCH_NPROC_PER_NODE": "4", "LAUNCH_OVERSUBSCRIBE": "1"}, "model.safetensors", ""),
        (
            {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1", "TRAIN_EVAL_BATCH_SIZE": "17"},
            "model.safetensors",
            "",
        ),
        ({"TRAIN_EMA_DECAY": "0.9"}, "ema.safetensors", "module."),
    ],
)
def test_accuracy_counts_each_test_image_once(
    entrypoint: Entrypoint, more: dict[str, str], file: str, prefix: str
) -> None:
    summary = entrypoint.train(env=QUIET | more | {"TRAIN_RUN_NAME": "run"})
    checkpoint = newest(entrypoint.folder / "runs/run/checkpoint")
    assert checkpoint is not None
    right, count = count_right(checkpoint, file, prefix)
    assert summary["test_images"] == count
    # A sum in another order may move an image that lies between two classes.
    assert summary["test_accuracy"] == pytest.approx(100 * right / count, abs=100 / count + 1e-4)


@pytest.mark.launch
def test_loss_that_is_not_finite_is_no_success(entrypoint: Entrypoint) -> None:
    env = QUIET | {"TRAIN_RUN_NAME": "run", "TRAIN_STEPS": "1", "TRAIN_LR": "1e30"}
    env = {name: value for name, value in env.items() if name != "TRAIN_EPOCHS"}
    assert "step 1: the test loss is " in entrypoint.error_line("train", env=env, code=5)
    folder = entrypoint.folder / "runs/run"
    assert not (folder / "summary.json").exists()
    assert not (folder / "checkpoint/best").exists()
    for path in folder.rglob("*.json*"):
        assert "NaN" not in path.read_text(), path
