"""What a run would refuse at its start, the plan refuses too."""

from __future__ import annotations

import pytest

from tests.conftest import refusal
from train.data.dataset_info import KNOWN, DatasetInfo
from train.planning.checks import check_trainer_settings
from train.settings import read_train_settings

DIGITS = KNOWN["digits"]
SKIPPING = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "pets", "TRAIN_ON_UNREADABLE_IMAGE": "skip"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TRAIN_BATCH_SIZE": "5000"}, "TRAIN_BATCH_SIZE=5000: larger than the training set of 1,442 images"),
        ({"TRAIN_PROFILE": "8", "TRAIN_STEPS": "8"}, "TRAIN_PROFILE=8: needs 13 steps, 5 of them as a warm-up"),
        ({"TRAIN_PROFILE": "20", "TRAIN_EPOCHS": "1"}, "this run has 22. Lower it to 17 or train longer."),
        (
            {"TRAIN_AUGMENT": "trivial,hflip-0"},
            "hflip-0: hflip has no effect, as none does not take a chance to flip",
        ),
        (
            {"TRAIN_AUGMENT": "hflip-0.5", "TRAIN_TRANSFORMS": "book"},
            "as book does not take a chance to flip.",
        ),
        (
            {"TRAIN_AUGMENT": "gray-0.1"},
            "gray has no effect, as the images are gray. Leave it out.",
        ),
        ({"TRAIN_REPEATED_AUGMENT": "3"}, "REPEATED_AUGMENT=3: nothing is augmented, so the copies are equal"),
        (
            {"TRAIN_REPEATED_AUGMENT": "3", "TRAIN_ERASING": "0.1", "TRAIN_BATCH_SIZE": "2"},
            "TRAIN_REPEATED_AUGMENT=3: a batch has 2 images",
        ),
        ({"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_STEPS": "10"}, "TRAIN_PRUNE_WARMUP=1: TRAIN_STEPS=10 are 1 epochs. Lower"),
    ],
)
def test_setting_that_the_run_would_refuse_is_refused(environ: dict[str, str], said: str) -> None:
    refusal(check_trainer_settings, read_train_settings(environ, {}), DIGITS, match=said)


@pytest.mark.parametrize(
    ("environ", "dataset"),
    [
        ({"TRAIN_MODEL": "speednet"}, DatasetInfo(100, (3, 32, 32))),
        ({"TRAIN_BATCH_SIZE": "1442"}, DIGITS),
        ({"TRAIN_PROFILE": "8", "TRAIN_STEPS": "13"}, DIGITS),
        ({"TRAIN_AUGMENT": "hflip-0,gray-0.1"}, DatasetInfo(100, (3, 32, 32), train_images=100)),
        ({"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_STEPS": "23"}, DIGITS),
        ({"TRAIN_PRUNE_RATIO": "0.5", "TRAIN_STEPS": "10", **SKIPPING}, DatasetInfo(99, (1, 8, 8), train_images=640)),
    ],
)
def test_setting_that_the_run_would_accept_is_accepted(environ: dict[str, str], dataset: DatasetInfo) -> None:
    check_trainer_settings(read_train_settings(environ, {}), dataset)


def test_cnn_needs_four_pixels() -> None:
    refusal(
        check_trainer_settings,
        read_train_settings({}, {}),
        DatasetInfo(100, (1, 3, 8)),
        match="needs images of 4 pixels, and these have 3x8",
    )
