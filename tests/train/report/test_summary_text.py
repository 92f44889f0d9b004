"""The summary on the screen says how sure an accuracy is."""

from __future__ import annotations

import pytest

from train.report.summary_text import interval_text


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
