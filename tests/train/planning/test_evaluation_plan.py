"""The plan of `evaluate`: what it says of settings that only training uses."""

from __future__ import annotations

import pytest

from train.planning.evaluation_plan import settings_of_training
from train.settings import read_train_settings


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({}, ""),
        ({"TRAIN_NUM_WORKERS": "2", "TRAIN_TEST_TIME_AUGMENT": "flip", "TRAIN_PRECISION": "bf16"}, ""),
        ({"TRAIN_WEIGHTS": "a.pth"}, "TRAIN_WEIGHTS=a.pth has"),
        ({"TRAIN_LR": "0.1", "TRAIN_EPOCHS": "3"}, "TRAIN_EPOCHS=3, TRAIN_LR=0.1 have"),
        ({"TRAIN_EPOCHS": "10"}, ""),  # the default
        ({"TRAIN_FREEZE": "\udc80"}, "TRAIN_FREEZE=\\udc80 has"),
    ],
)
def test_settings_of_training_are_named_in_one_line(env: dict[str, str], said: str) -> None:
    lines = settings_of_training(read_train_settings({"TRAIN_EVALUATE": "runs/a", **env}, {}))
    assert lines == ((f"{said} no effect: evaluate trains nothing",) if said else ())
