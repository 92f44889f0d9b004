"""What is held of images that are decoded ahead."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from tests.factories import make_machine
from tests.train.planning.memory_refusal import check_memory_refusal
from train.data.dataset_info import DatasetInfo

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
