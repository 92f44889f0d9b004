"""A setting of the user that has no effect is named by the plan."""

from __future__ import annotations

import pytest

from entrypoint.core.settings_base import rules_of
from tests.factories import train_settings
from train.planning.model_report import ModelReport
from train.planning.techniques import exclusions, unused_settings
from train.settings import TrainSettings, read_train_settings

FOLDER = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "pets"}
PRUNED = {"TRAIN_PRUNE_RATIO": "0.5"}
SPEEDNET = {"TRAIN_MODEL": "speednet"}
# Variable and value, the environment and source and ranks that make it useless, those that make it useful.
ALL_OF_TEACHER = {"TRAIN_TEACHER": "x", "TRAIN_TEACHER_WEIGHT": "1"}
LABELS, NUMBERS = {"TRAIN_TASK": "multilabel"}, {"TRAIN_TASK": "regress"}
CASES = [
    ("TRAIN_BALANCE=1", LABELS, "memory", 1, {}, "memory", 1),
    ("TRAIN_CLASS_WEIGHTS=auto", ALL_OF_TEACHER, "memory", 1, {"TRAIN_TEACHER": "x"}, "memory", 1),
    ("TRAIN_LOSS=focal", ALL_OF_TEACHER, "memory", 1, {"TRAIN_TEACHER": "x"}, "memory", 1),
    ("TRAIN_LABEL_SMOOTHING=0.1", ALL_OF_TEACHER, "memory", 1, {"TRAIN_TEACHER": "x"}, "memory", 1),
    ("TRAIN_TEACHER=x", {"TRAIN_TEACHER_WEIGHT": "0"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_CLASS_WEIGHTS=auto", NUMBERS, "memory", 1, LABELS, "memory", 1),
    ("TRAIN_LABEL_SEPARATOR=;", {}, "memory", 1, LABELS, "memory", 1),
    ("TRAIN_TEACHER=runs/large", LABELS, "memory", 1, {}, "memory", 1),
    ("TRAIN_TEACHER_WEIGHT=0.9", {}, "memory", 1, {"TRAIN_TEACHER": "runs/large"}, "memory", 1),
    ("TRAIN_THRESHOLD=0.3", NUMBERS, "memory", 1, LABELS, "memory", 1),
    ("TRAIN_LABEL_SMOOTHING=0.1", LABELS, "memory", 1, {}, "memory", 1),
    ("TRAIN_LABEL_SMOOTHING=0.1", {"TRAIN_LOSS": "focal"}, "memory", 1, {"TRAIN_LOSS": "bce"}, "memory", 1),
    ("TRAIN_NUM_WORKERS=8", {}, "memory", 1, FOLDER, "stream", 1),
    ("TRAIN_CACHE_DIR=c", {}, "memory", 1, FOLDER, "memory", 1),
    ("TRAIN_CACHE_DIR=c", FOLDER, "stream", 1, FOLDER, "memory", 1),
    ("TRAIN_CACHE_DIR=c", FOLDER, "stream", 1, {"TRAIN_DATASET": "shards"}, "stream", 1),
    ("TRAIN_ON_UNREADABLE_IMAGE=skip", {}, "memory", 1, FOLDER, "stream", 1),
    ("TRAIN_DATA_DIR=d", {"TRAIN_DATASET": "digits"}, "memory", 1, {"TRAIN_DATASET": "cifar10"}, "memory", 1),
    ("TRAIN_PREEMPTION=ec2", {"TRAIN_CHECKPOINT_EVERY": "0"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_DATA_COLUMNS=a,b", FOLDER, "memory", 1, {"TRAIN_DATASET": "hf:a/b"}, "memory", 1),
    ("TRAIN_SYNTHETIC_IMAGES=100", {}, "memory", 1, {"TRAIN_DATASET": "synthetic"}, "memory", 1),
    ("TRAIN_SYNTHETIC_SHAPE=1x9x9", {}, "memory", 1, {"TRAIN_DATASET": "synthetic"}, "memory", 1),
    ("TRAIN_PRUNE_EXCLUDE=conv1", {}, "memory", 1, PRUNED, "memory", 1),
    ("TRAIN_PRUNE_WARMUP=2", {}, "memory", 1, PRUNED, "memory", 1),
    ("TRAIN_MOMENTUM=0.8", {"TRAIN_OPTIMIZER": "adam"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_WEIGHT_DECAY=0.1", {"TRAIN_OPTIMIZER": "rprop"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_DECAY_NORMS=0", {"TRAIN_OPTIMIZER": "rprop"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_DECAY_NORMS=0", {"TRAIN_WEIGHT_DECAY": "0"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_EARLY_STOPPING=5", {"TRAIN_EPOCHS": "2"}, "memory", 1, {}, "memory", 1),
    (
        "TRAIN_MIXUP_ALPHA=1",
        {"TRAIN_STEPS": "30", "TRAIN_UNMIXED_EPOCHS": "3"},
        "memory",
        1,
        {"TRAIN_STEPS": "31"},
        "memory",
        1,
    ),
    ("TRAIN_UNMIXED_EPOCHS=3", {}, "memory", 1, {"TRAIN_MIXUP_ALPHA": "0.2"}, "memory", 1),
    ("TRAIN_MIXUP_ALPHA=1", {"TRAIN_UNMIXED_EPOCHS": "10"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_CUTMIX_ALPHA=1", {"TRAIN_UNMIXED_EPOCHS": "10"}, "memory", 1, {"TRAIN_UNMIXED_EPOCHS": "9"}, "memory", 1),
    ("TRAIN_WEIGHTS=a.pth", {"TRAIN_RESUME": "runs/a"}, "memory", 1, {"TRAIN_RESUME": "auto"}, "memory", 1),
    ("TRAIN_LR_LAYER_DECAY=0.5", {"TRAIN_FREEZE": "backbone"}, "memory", 1, {"TRAIN_FREEZE": "conv1"}, "memory", 1),
    ("TRAIN_SYNC_BATCHNORM=0", SPEEDNET | {"TRAIN_FREEZE": "statistics"}, "memory", 2, SPEEDNET, "memory", 2),
    ("TRAIN_CROP_SCALE=0.3", {}, "memory", 1, {"TRAIN_TRANSFORMS": "imagenet"}, "memory", 1),
    ("TRAIN_CROP_RATIO=1", {}, "memory", 1, {"TRAIN_TRANSFORMS": "imagenet"}, "memory", 1),
    ("TRAIN_EVAL_SIZE=64", {"TRAIN_IMAGE_SIZE": "64"}, "memory", 1, {"TRAIN_IMAGE_SIZE": "48"}, "memory", 1),
    ("TRAIN_WEIGHTS_STRICT=0", {}, "memory", 1, {"TRAIN_WEIGHTS": "a.pth"}, "memory", 1),
    ("TRAIN_MODEL_PATH=here", {}, "memory", 1, {"TRAIN_MODEL": "own:model"}, "memory", 1),
    ("TRAIN_DDP_FIND_UNUSED_PARAMETERS=1", {}, "memory", 1, {}, "memory", 2),
    ("TRAIN_SYNC_BATCHNORM=0", SPEEDNET, "memory", 1, SPEEDNET, "memory", 2),
    ("TRAIN_SYNC_BATCHNORM=0", {}, "memory", 2, SPEEDNET, "memory", 2),
    ("TRAIN_KEEP_CHECKPOINTS=5", {"TRAIN_CHECKPOINT_EVERY": "0"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_KEEP_BEST=3", {"TRAIN_EVAL_EVERY": "10"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_KEEP_BEST=5", {"TRAIN_CHECKPOINT_EVERY": "0"}, "memory", 1, {}, "memory", 1),
    ("TRAIN_MAX_LOSS=2", {}, "memory", 1, {"TRAIN_EVALUATE": "runs/a"}, "memory", 1),
    ("TRAIN_AVERAGE=a,b", {}, "memory", 1, {"TRAIN_EVALUATE": "runs/a"}, "memory", 1),
    ("TRAIN_RESUME_ALLOW_CHANGED=1", {}, "memory", 1, {"TRAIN_RESUME": "auto"}, "memory", 1),
]


@pytest.mark.parametrize(("setting", "without", "source", "ranks", "within", "other_source", "other_ranks"), CASES)
def test_setting_without_effect_is_named_and_only_then(
    setting: str,
    without: dict[str, str],
    source: str,
    ranks: int,
    within: dict[str, str],
    other_source: str,
    other_ranks: int,
) -> None:
    name, value = setting.split("=")
    useless = read_train_settings({name: value} | without, {})
    report = ModelReport(has_weight_decay=useless.values.optim.optimizer != "rprop", parameters=9)
    lines = unused_settings(useless, source, ranks, report, useless.values.optim.total_epochs(10))
    (line,) = [one for one in lines if one.startswith(setting)]
    assert line.startswith(f"{setting} has no effect: ")
    useful = read_train_settings(within | {name: value}, {})
    assert not [
        one
        for one in unused_settings(
            useful, other_source, other_ranks, ModelReport(), useful.values.optim.total_epochs(10)
        )
        if one.startswith(setting)
    ]


def test_every_row_is_a_setting_and_has_a_case() -> None:
    fields = {setting.partition("=")[0].removeprefix("TRAIN_").lower() for setting, *_ in CASES}
    needing = {name for name, rules in rules_of(TrainSettings).items() if rules.needs}
    rows = exclusions(TrainSettings(), "memory", 1, ModelReport(), 1)
    assert {*(field for field, _, _ in rows), *needing} == fields


def test_defaults_are_never_named() -> None:
    assert train_settings() == TrainSettings()
    environ = {
        "TRAIN_NUM_WORKERS": "auto",
        "TRAIN_MOMENTUM": "0.9",
        "TRAIN_OPTIMIZER": "adam",
        "TRAIN_PRUNE_WARMUP": "1",
    }
    assert unused_settings(read_train_settings(environ, {}), "memory", 1, ModelReport(), 1) == ()
