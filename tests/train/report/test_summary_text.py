"""The summary on the screen says how sure an accuracy is."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.engine.finish import code_flags
from train.report.summary_text import interval_text
from train.settings import TrainSettings


@pytest.mark.parametrize(
    ("accuracy", "images", "text"),
    [
        (68.75, 80, "58 to 78 % with 95 % confidence, by 80 test images"),
        (100, 8, "68 to 100 % with 95 % confidence, by 8 test images"),  # scipy.stats.binomtest(8, 8), "wilson": 0.676
        (90, 500, ""),
    ],
)
def test_few_images_say_between_what_the_accuracy_lies(accuracy: float, images: int, text: str) -> None:
    assert interval_text(accuracy, images) == text


def test_commands_name_the_users_own_code() -> None:
    own = TrainSettings().with_values(model="a:b", model_path=Path("x y"), dataset="c:d")
    assert code_flags(own) == (" --model=a:b --model-path='x y'", " --dataset=c:d")
    assert code_flags(TrainSettings()) == ("", "")
