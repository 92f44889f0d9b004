"""What the trainer refuses: in one line on one rank or two, and nothing lost on disk."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Entrypoint, script
from tests.train.given import SMALL, TWO_RANKS_WHERE_THEY_FIT

pytestmark = pytest.mark.launch


@pytest.mark.slow_except("ranks0")
@pytest.mark.parametrize("ranks", [{}, TWO_RANKS_WHERE_THEY_FIT])
def test_loss_not_finite_stops_and_keeps_last_good_checkpoint(entrypoint: Entrypoint, ranks: dict[str, str]) -> None:
    env = SMALL | ranks | {"TRAIN_SCHEDULE": "constant", "TRAIN_RUN_NAME": "mine", "TRAIN_EPOCHS": "2"}
    entrypoint.train(env=env | {"TRAIN_LR": "0.01"})
    kept = sorted((entrypoint.folder / "runs/mine/checkpoint").iterdir())
    result = entrypoint("train", env=env | {"TRAIN_LR": "1e30", "TRAIN_RUN_NAME": "wild", "LAUNCH_QUIET": "1"})
    assert result.code == 5
    assert re.fullmatch(
        r"entrypoint: error: step \d+: the loss is (nan|inf|-inf)\. Lower TRAIN_LR.*", result.err.strip()
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
    result = entrypoint("train", "--skip-nonfinite=1", env=env)
    assert result.code == 0, result.err
    assert result.err.count("is skipped: its loss or gradients are not finite") == 2
    assert entrypoint.summary("mine")["skipped_steps"] == 2
    metrics = (entrypoint.folder / "runs/mine/metrics.jsonl").read_text().splitlines()
    assert all(line["grad_norm"] > 0 for line in map(json.loads, metrics) if "images_per_second" in line)
    assert entrypoint("train", env=env | {"TRAIN_RUN_NAME": "other"}).code == 5


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TRAIN_MODEL": "resnet81"}, "TRAIN_MODEL=resnet81: "),
        ({"TRAIN_BATCH_SIZE": "5000"}, "TRAIN_BATCH_SIZE=5000: larger than the training set of 1,442 images"),
        ({"TRAIN_RESUME": "nowhere.pt"}, "TRAIN_RESUME=nowhere.pt: no such checkpoint"),
        ({"TRAIN_DATASET": "cifar10", "TRAIN_DOWNLOAD": "0"}, "TRAIN_DATASET=cifar10: "),
    ],
)
def test_trainer_user_error_is_one_line(entrypoint: Entrypoint, env: dict[str, str], said: str) -> None:
    result = entrypoint("train", env=env | {"LAUNCH_QUIET": "1"})
    assert result.code == 2
    assert result.err.startswith(f"entrypoint: error: {said}")
    assert len(result.err.splitlines()) == 1
