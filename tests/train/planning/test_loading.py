"""How images are loaded: what is held of those that are decoded ahead, and how inputs are normalized."""

from __future__ import annotations

import pytest

from tests.conftest import refusal
from train.planning.loading import IMAGENET, Normalization, decide_normalization
from train.settings import read_train_settings

STREAMED = {
    "TRAIN_DATASET": "imagefolder",
    "TRAIN_DATA_DIR": "/pets",
    "TRAIN_DATA_SOURCE": "stream",
    "TRAIN_MODEL": "resnet18",
}

HALF: Normalization = ((0.5,) * 3, (0.25,) * 3)
WEIGHTS = {"TRAIN_WEIGHTS": "a.pth"}


@pytest.mark.parametrize(
    ("environ", "channels", "source", "of_weights", "wanted", "said"),
    [
        ({}, 3, "memory", None, None, "mean and deviation of the training images"),
        ({}, 3, "stream", None, IMAGENET, "a stream's own is not known before"),
        ({}, 1, "stream", None, ((0.5,), (64 / 255,)), "ImageNet's"),
        (WEIGHTS, 3, "memory", HALF, HALF, "that of the weights"),
        (WEIGHTS, 1, "memory", HALF, ((0.5,), (0.25,)), "that of the weights"),
        (WEIGHTS, 3, "memory", None, IMAGENET, "the weights do not say theirs"),
        (WEIGHTS | {"TRAIN_NORMALIZE": "data"}, 3, "stream", HALF, None, "(set by you)"),
        ({"TRAIN_NORMALIZE": "imagenet"}, 3, "memory", None, IMAGENET, "(set by you)"),
        ({"TRAIN_NORMALIZE": "0.1,.2,0.3/1,1,1"}, 3, "memory", None, ((0.1, 0.2, 0.3), (1, 1, 1)), "(set by you)"),
    ],
)
def test_normalization(
    environ: dict[str, str],
    channels: int,
    source: str,
    of_weights: Normalization | None,
    wanted: Normalization | None,
    said: str,
) -> None:
    found, decision = decide_normalization(read_train_settings(environ, {}), channels, source, of_weights)
    assert found == wanted
    assert said in decision.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.5/0.5", "has 1 means and 1 deviations, and the images have 3 channels"),
        ("0.5,0.5,0.5/0.5,0.5", "has 3 means and 2 deviations"),
        ("0.5,0.5,0.5/0.5,0.5,0", "deviations above 0"),
        ("123,116,104/58,57,57", "Divide byte values by 255"),
    ],
)
def test_wrong_normalization_is_one_line(text: str, said: str) -> None:
    assert refusal(
        decide_normalization, read_train_settings({"TRAIN_NORMALIZE": text}, {}), 3, "memory", None, match=said
    ).startswith(f"TRAIN_NORMALIZE={text}: ")


def test_text_that_is_no_normalization_is_refused() -> None:
    for text in ("imagenets", "0.5", "a/b", "-1/1", "1/1/1"):
        refusal(read_train_settings, {"TRAIN_NORMALIZE": text}, {}, match=r"^TRAIN_NORMALIZE=")
