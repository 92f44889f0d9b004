"""The accuracy of a run is that of its weights on each test image once, counted here without the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Entrypoint
from tests.factories import train_settings
from train.checkpoint.folder import newest
from train.checkpoint.metadata import read_metadata
from train.data.datasets import ImageTensors, load_digits
from train.models.cnn import CNN

pytestmark = pytest.mark.launch
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


def test_loss_that_is_not_finite_is_no_success(entrypoint: Entrypoint) -> None:
    env = QUIET | {"TRAIN_RUN_NAME": "run", "TRAIN_STEPS": "1", "TRAIN_LR": "1e30"}
    env = {name: value for name, value in env.items() if name != "TRAIN_EPOCHS"}
    result = entrypoint("train", env=env)
    assert result.code == 5, result.out
    assert len(result.error_lines) == 1
    assert "step 1: the test loss is " in result.err
    folder = entrypoint.folder / "runs/run"
    assert not (folder / "summary.json").exists()
    assert not (folder / "checkpoint/best").exists()
    for path in folder.rglob("*.json*"):
        assert "NaN" not in path.read_text(), path
