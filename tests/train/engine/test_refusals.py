"""What the trainer refuses: in one line on one rank or two, and nothing lost on disk."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Entrypoint, needs_two_cores, script
from tests.train.given import SMALL, TWO_RANKS_WHERE_THEY_FIT

pytestmark = pytest.mark.launch


@pytest.mark.slow_except("ranks0")
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS_WHERE_THEY_FIT])
def test_loss_not_finite_stops_and_keeps_last_good_checkpoint(entrypoint: Entrypoint, ranks: dict[str, str]) -> None:
    env = SMALL | ranks | {"TRAIN_SCHEDULE": "constant", "TRAIN_RUN_NAME": "mine", "TRAIN_EPOCHS": "2"}
    entrypoint.train(env=env | {"TRAIN_LR": "0.01"})
    kept = sorted((entrypoint.folder / "runs/mine/checkpoint").iterdir())
    assert re.fullmatch(
        r"entrypoint: error: step \d+: the loss is (nan|inf|-inf)\. Lower TRAIN_LR.*",
        entrypoint.error_line(
            "train", env=env | {"TRAIN_LR": "1e30", "TRAIN_RUN_NAME": "wild", "LAUNCH_QUIET": "1"}, code=5
        ),
    )
    assert not list((entrypoint.folder / "runs/wild").glob("checkpoint/*"))
    assert sorted((entrypoint.folder / "runs/mine/checkpoint").iterdir()) == kept


OVERFLOWS = """
import os
from torch import nn
class Net(nn.Module):
    steps = 0
    def __init__(self, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, classes))
    def forward(self, images):
        self.steps += self.training
        bad = self.training and self.steps in (9, 14) and os.environ.get("RANK", "0") == os.environ["BAD_RANK"]
        return self.layers(images * float("nan") if bad else images)
def net(num_classes=10):
    return Net(num_classes)
"""


@pytest.mark.parametrize("ranks", [{"BAD_RANK": "0"}, {"BAD_RANK": "1"} | TWO_RANKS_WHERE_THEY_FIT])
def test_step_that_overflows_on_one_rank_is_skipped_on_all(entrypoint: Entrypoint, ranks: dict[str, str]) -> None:
    script(entrypoint.folder, "overflowing.py", OVERFLOWS)
    env = SMALL | ranks | {"TRAIN_MODEL": "overflowing:net", "TRAIN_EPOCHS": "3", "TRAIN_RUN_NAME": "mine"}
    result = entrypoint.succeed("train", "--skip-nonfinite=1", env=env)
    assert result.err.count("is skipped: its loss or gradients are not finite") == 2
    assert entrypoint.summary("mine")["skipped_steps"] == 2
    metrics = (entrypoint.folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert all(line["grad_norm"] > 0 for line in map(json.loads, metrics) if "images_per_second" in line)
    assert entrypoint("train", env=env | {"TRAIN_RUN_NAME": "other"}).code == 5


IMAGES = {
    "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_IMAGES": "40", "TRAIN_MODEL": "resnet18", "TRAIN_STEPS": "1",
    "LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0",
}  # fmt: skip
RANKS = {"LAUNCH_NPROC_PER_NODE": "2"}


@pytest.mark.slow_except("env0")
@pytest.mark.parametrize(
    ("env", "least"),
    [
        ({"TRAIN_BATCH_SIZE": "1"}, 2),
        ({"TRAIN_BATCH_SIZE": "8", "TRAIN_GRAD_ACCUM_STEPS": "8"}, 16),
        pytest.param({"TRAIN_BATCH_SIZE": "2", "TRAIN_SYNC_BATCHNORM": "0", **RANKS}, 4, marks=needs_two_cores),
        pytest.param(
            {"TRAIN_BATCH_SIZE": "3", "TRAIN_SYNC_BATCHNORM": "0", **RANKS},
            4,
            marks=[needs_two_cores, pytest.mark.slow],
        ),
    ],
)
@pytest.mark.usefixtures("torchvision")
def test_batchnorm_on_one_image_is_refused_before_training(
    entrypoint: Entrypoint, env: dict[str, str], least: int
) -> None:
    for words in (("plan", "train"), ("train",)):
        line = entrypoint.error_line(*words, env=IMAGES | env)
        assert f"TRAIN_BATCH_SIZE={env['TRAIN_BATCH_SIZE']}: resnet18 needs 2 images per micro-batch" in line
        assert line.endswith(f"Set at least {least}.")


@pytest.mark.parametrize(
    "env",
    [
        {"TRAIN_BATCH_SIZE": "1", "TRAIN_SYNTHETIC_SHAPE": "3x64x64"},
        pytest.param({"TRAIN_BATCH_SIZE": "2", **RANKS}, marks=needs_two_cores),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("torchvision")
def test_batches_that_batchnorm_can_take_are_trained(entrypoint: Entrypoint, env: dict[str, str]) -> None:
    assert entrypoint.train(env=IMAGES | env)["steps"] == 1
