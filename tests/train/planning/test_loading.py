"""How images are loaded: what is held of those that are decoded ahead, and how inputs are normalized."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from tests.conftest import refusal
from tests.factories import make_machine
from tests.train.planning.memory_refusal import check_memory_refusal
from train.data.dataset_info import DatasetInfo
from train.planning.loading import IMAGENET, Normalization, decide_normalization
from train.settings import read_train_settings

STREAMED = {
    "TRAIN_DATASET": "imagefolder",
    "TRAIN_DATA_DIR": "/pets",
    "TRAIN_DATA_SOURCE": "stream",
    "TRAIN_MODEL": "resnet18",
}
# An image takes 147 KiB, so 1,000 of them 0.14 GiB. The node has 1.4 GiB.
MANY = DatasetInfo(200_000, (3, 224, 224))
FEW = DatasetInfo(2_000, (3, 224, 224))
# 14,000 images take 2 GiB.
MORE = DatasetInfo(14_000, (3, 224, 224), train_images=4_000)
NODE = replace(make_machine(4), memory_bytes=int(1.4 * 2**30))


@pytest.mark.parametrize(
    ("more", "facts", "ranks", "gib"),
    [
        ({}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "5"}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "7"}, MANY, 1, "1.1 GiB on 1 rank"),
        # The batch is the global one: two ranks of a node hold as much as one.
        ({"TRAIN_PREFETCH_FACTOR": "5"}, MANY, 2, ""),
        ({"TRAIN_PREFETCH_FACTOR": "7"}, MANY, 2, "1.1 GiB on 2 ranks"),
        # An epoch has no more images.
        ({"TRAIN_PREFETCH_FACTOR": "1000000"}, FEW, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "1000000", "TRAIN_DATA_SOURCE": "memory"}, FEW, 1, ""),
        # Without threads that decode nothing is decoded ahead.
        ({"TRAIN_PREFETCH_FACTOR": "1000000", "TRAIN_NUM_WORKERS": "0"}, MANY, 1, ""),
        # The loader prepares micro-batches.
        ({"TRAIN_PREFETCH_FACTOR": "7", "TRAIN_GRAD_ACCUM_STEPS": "4"}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "31", "TRAIN_GRAD_ACCUM_STEPS": "4"}, MANY, 1, "1.1 GiB on 1 rank"),
        ({"TRAIN_PREFETCH_FACTOR": "1", "TRAIN_BATCH_SIZE": "4000"}, MANY, 1, "1.1 GiB on 1 rank"),
        # An evaluation reads ahead by the same factor, here as many images of each rank.
        ({"TRAIN_PREFETCH_FACTOR": "7", "TRAIN_BATCH_SIZE": "8"}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "1", "TRAIN_EVAL_BATCH_SIZE": "3000"}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "1", "TRAIN_EVAL_BATCH_SIZE": "4000"}, MANY, 1, "1.1 GiB on 1 rank"),
        ({"TRAIN_PREFETCH_FACTOR": "1", "TRAIN_EVAL_BATCH_SIZE": "2000"}, MANY, 2, "1.1 GiB on 2 ranks"),
        ({"TRAIN_PREFETCH_FACTOR": "31", "TRAIN_BATCH_SIZE": "8"}, MANY, 1, "1.1 GiB on 1 rank"),
        # Each part has no more images.
        ({"TRAIN_PREFETCH_FACTOR": "99", "TRAIN_BATCH_SIZE": "4000", "TRAIN_EVAL_BATCH_SIZE": "50"}, MORE, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "99"}, MORE, 1, "1.4 GiB on 1 rank"),
        ({"TRAIN_PREFETCH_FACTOR": "9999", "TRAIN_EVAL_BATCH_SIZE": "50"}, FEW, 1, ""),
    ],
)
def test_images_decoded_ahead_must_fit_into_memory(
    more: Mapping[str, str], facts: DatasetInfo, ranks: int, gib: str
) -> None:
    environ = {"TRAIN_BATCH_SIZE": "1024", **STREAMED, **more}
    asked = environ.get("TRAIN_PREFETCH_FACTOR")
    problem = rf"^TRAIN_PREFETCH_FACTOR={asked}: .* take {gib}, over 80 % of" if gib else ""
    check_memory_refusal(environ, facts, ranks, NODE, problem)


@pytest.mark.parametrize(
    ("more", "facts", "ranks", "gib"),
    [
        ({}, MANY, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "31"}, MANY, 1, "1.1 GiB on 1 rank"),
        ({"TRAIN_PREFETCH_FACTOR": "1", "TRAIN_EVAL_BATCH_SIZE": "2000"}, MANY, 2, "1.1 GiB on 2 ranks"),
        ({"TRAIN_PREFETCH_FACTOR": "9999"}, FEW, 1, ""),
        ({"TRAIN_PREFETCH_FACTOR": "9999"}, MORE, 2, "1.4 GiB on 2 ranks"),
        # It has no batches of training.
        ({"TRAIN_PREFETCH_FACTOR": "2", "TRAIN_BATCH_SIZE": "40000"}, MANY, 1, ""),
    ],
)
def test_images_that_evaluate_decodes_ahead_must_fit(
    more: Mapping[str, str], facts: DatasetInfo, ranks: int, gib: str
) -> None:
    environ = {**STREAMED, "TRAIN_EVALUATE": "run", **more}
    problem = rf"^TRAIN_PREFETCH_FACTOR=.* take {gib}, .* or TRAIN_EVAL_BATCH_SIZE\.$" if gib else ""
    check_memory_refusal(environ, facts, ranks, NODE, problem)


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
