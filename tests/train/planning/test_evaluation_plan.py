"""The plan of `evaluate`: what it says of settings that only training uses."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from train.planning.evaluation_plan import unused_by_evaluation
from train.planning.techniques import decide_model
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
def test_unused_settings_are_named_in_one_line(env: dict[str, str], said: str) -> None:
    lines = unused_by_evaluation(read_train_settings({"TRAIN_EVALUATE": "runs/a", **env}, {}))
    assert lines == ((f"{said} no effect: evaluate trains nothing",) if said else ())


def test_setting_that_another_one_switches_off_is_named() -> None:
    given = read_train_settings({"TRAIN_EVALUATE": "runs/a", "TRAIN_THRESHOLD": "0.7"}, {})
    assert unused_by_evaluation(given) == ("TRAIN_THRESHOLD=0.7 has no effect: TRAIN_TASK is classify",)


@pytest.mark.parametrize("model", ["cnn", "resnet18"])
def test_model_to_evaluate_is_not_called_the_recipes(model: str) -> None:
    given = read_train_settings({"TRAIN_EVALUATE": "runs/a"}, {})
    of_the_run = replace(given, values=given.values.with_values(model=model))
    assert decide_model(of_the_run).text == "as it was trained"
