"""Every two settings together: each pair trains, or is refused with a reason; none crashes."""

from __future__ import annotations

import json
import os
import re
from itertools import combinations
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.conftest import Entrypoint, needs_two_cores, paint
from tests.net import free_port

pytestmark = [pytest.mark.launch, pytest.mark.slow]

PROGRAM = Path(__file__).with_name("setting_pairs.py")
BASE = {
    "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_SHAPE": "3x8x8", "TRAIN_SYNTHETIC_IMAGES": "16",
    "TRAIN_BATCH_SIZE": "8", "TRAIN_EPOCHS": "2", "TRAIN_TENSORBOARD": "0", "TRAIN_PROGRESS": "off",
    "TRAIN_LOG_INTERVAL": "1",
    "TRAIN_RUN_NAME": "run", "LAUNCH_CPU_BINDING": "none",
}  # fmt: skip
OPTIONS: dict[str, dict[str, str]] = {
    "compile": {"TRAIN_COMPILE": "default", "TRAIN_COMPILE_BACKEND": "aot_eager"},
    "compile auto": {"TRAIN_COMPILE": "auto"},
    "bf16": {"TRAIN_PRECISION": "bf16"},
    "fp16": {"TRAIN_PRECISION": "fp16"},
    "prune": {"TRAIN_PRUNE_RATIO": "0.5"},
    "contiguous": {"TRAIN_CHANNELS_LAST": "0"},
    "winograd off": {"TRAIN_WINOGRAD": "off"},
    "accumulate": {"TRAIN_GRAD_ACCUM_STEPS": "2"},
    "ema": {"TRAIN_EMA_DECAY": "0.9"},
    "mixup": {"TRAIN_MIXUP_ALPHA": "0.4"},
    "cutmix": {"TRAIN_CUTMIX_ALPHA": "1"},
    "clip": {"TRAIN_MAX_GRAD_NORM": "1"},
    "adamw": {"TRAIN_OPTIMIZER": "adamw", "TRAIN_SCHEDULE": "cosine"},
    "profile": {"TRAIN_PROFILE": "1"},
    "deterministic": {"TRAIN_DETERMINISTIC": "1"},
    "no bias": {"TRAIN_MODEL_ARGS": "bias=0"},
    "smoothing": {"TRAIN_LABEL_SMOOTHING": "0.1"},
    "augment": {"TRAIN_AUGMENT": "trivial", "TRAIN_ERASING": "0.5", "TRAIN_REPEATED_AUGMENT": "2"},
    "crops": {"TRAIN_TRANSFORMS": "imagenet", "TRAIN_AUGMENT": "rand-9-2"},
    "rates": {
        "TRAIN_OPTIMIZER": "rmsprop",
        "TRAIN_LR_LAYER_DECAY": "0.5",
        "TRAIN_HEAD_LR": "0.01",
        "TRAIN_LR": "0.001",
    },
    "frozen": {"TRAIN_FREEZE": "layer1", "TRAIN_DECAY_NORMS": "0", "TRAIN_SCHEDULE": "cosine"},
    "evaluation": {"TRAIN_TEST_TIME_AUGMENT": "flip-shift", "TRAIN_EVAL_EVERY": "2"},
}
SPEEDNET = {
    "TRAIN_MODEL": "speednet-half",
    "TRAIN_SYNTHETIC_SHAPE": "3x16x16",
}  # some of whose weights stay as they are
# Slower ones, each with what it might not go with.
RARER = [
    {"TRAIN_EXPORT": "onnx", **OPTIONS[other]} for other in ("prune", "ema", "bf16", "compile", "contiguous")
] + [
    {"TRAIN_MODEL": "resnet18", "TRAIN_SYNTHETIC_SHAPE": "3x32x32", "TRAIN_LR": "0.001", **OPTIONS[other]}
    for other in ("compile", "fp16", "prune", "ema", "accumulate", "mixup")
] + [
    # insists on its version
    {"TRAIN_MODEL": "mnasnet0_5", "TRAIN_SYNTHETIC_SHAPE": "3x32x32", "TRAIN_LR": "0.001", **OPTIONS["prune"]}
] + [
    {**SPEEDNET, "TRAIN_SIZE_SCHEDULE": "12:0.5,16", **OPTIONS[other]}
    for other in ("compile", "fp16", "prune", "mixup", "augment", "deterministic")
]  # fmt: skip
SHARED: dict[str, dict[str, str]] = {
    "find unused": {"TRAIN_DDP_FIND_UNUSED_PARAMETERS": "1"},
}
FSDP = {"TRAIN_PARALLELISM": "fsdp"}
PARTS = 4
EACH = int(os.environ.get("PAIRS_EACH", "1"))  # of a list's pairs, each EACHth is trained
TWO = {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1"}


def check(entrypoint: Entrypoint, environs: list[dict[str, str]], *more: str) -> list[list[float]]:
    """Train with each; a step's own words must be a refusal that names a setting. Return the losses of each."""
    combined = [BASE | one for one in environs]
    folder = Path(mkdtemp(dir=entrypoint.folder))
    (folder / "combinations.json").write_text(json.dumps(combined))
    port = str(free_port(len(environs)))
    result = entrypoint("run", *more, PROGRAM, folder, port, env={"LAUNCH_QUIET": "1"})
    said = [json.loads(line) for line in result.out.splitlines() if line.startswith('"')]
    wrong = [(one, word) for one, word in zip(environs, said, strict=False)
             if word and not re.match(r"refused: (TRAIN|LAUNCH)_\w+=\S+", word)]  # fmt: skip
    assert not wrong, wrong
    assert len(said) == len(environs), result.err[-3000:]
    assert result.code == 0
    assert sum(not word for word in said) > len(said) / 2, "most pairs work"
    losses: list[list[float]] = []
    for index, word in enumerate(said):
        lines = [] if word else (folder / f"runs{index}/run/metrics.jsonl").read_text().splitlines()
        losses.append([line["loss"] for line in map(json.loads, lines) if line["kind"] == "step"])
        assert len(losses[-1]) == (0 if word else 4)
    return losses


@pytest.mark.parametrize("part", range(PARTS))
def test_any_two_settings_train_or_raise(entrypoint: Entrypoint, part: int) -> None:
    pairs = list(combinations(OPTIONS, 2))[part :: PARTS * EACH]
    check(entrypoint, [OPTIONS[one] | OPTIONS[other] for one, other in pairs])


@pytest.mark.usefixtures("torchvision")
def test_any_two_slow_settings_train_or_raise(entrypoint: Entrypoint) -> None:
    check(entrypoint, RARER[::EACH])


def streamed(tmp_path: Path) -> list[dict[str, str]]:
    """Return what streams image files, with the transforms of this feed and with threads or none."""
    paint(tmp_path / "files/train", each=8, size=(40, 30))
    paint(tmp_path / "files/test", each=4, size=(40, 30))
    files = {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(tmp_path / "files"), "TRAIN_DATA_SOURCE": "stream",
        "TRAIN_IMAGE_SIZE": "16", "TRAIN_BATCH_SIZE": "12", "TRAIN_MODEL": "speednet-half",
    }  # fmt: skip
    return [
        files | {"TRAIN_TRANSFORMS": transforms, "TRAIN_NUM_WORKERS": workers}
        for transforms, workers in (("flip-crop", "2"), ("imagenet", "2"), ("imagenet", "0"), ("none", "1"))
    ]


@pytest.mark.parametrize("part", range(2))
def test_any_setting_trains_from_a_stream(entrypoint: Entrypoint, tmp_path: Path, part: int) -> None:
    feeds = streamed(tmp_path)
    losses = check(entrypoint, [feed | one for one in [{}, *OPTIONS.values()][part::2] for feed in feeds])
    for index in range(0, len(losses), len(feeds)):
        assert losses[index + 1] == losses[index + 2], "the number of threads changes nothing"


@needs_two_cores
def test_two_ranks_equal_one_rank_from_a_stream(entrypoint: Entrypoint, tmp_path: Path) -> None:
    feeds = streamed(tmp_path)
    environs = [feed | one for one in ({}, OPTIONS["accumulate"], OPTIONS["cutmix"]) for feed in feeds]
    learnt = check(entrypoint, environs)
    two = check(entrypoint, [TWO | one for one in environs], "--nproc-per-node=2", "--oversubscribe=1")
    for environ, one, both in zip(environs, learnt, two, strict=True):
        assert both == pytest.approx(one, rel=1e-5), environ


@pytest.mark.versions
@needs_two_cores
def test_two_ranks_equal_one_rank_with_any_setting(entrypoint: Entrypoint) -> None:
    """BatchNorm's statistics and all that goes over the ranks: what one learns with a setting, two learn with it."""
    settings = [{}, *OPTIONS.values()]
    learnt = check(entrypoint, [SPEEDNET | one for one in settings])
    whole: list[tuple[int, dict[str, str]]] = [(one, {}) for one in range(len(settings))]
    for shared in (whole, [(one, FSDP) for one, _ in whole], [(0, more) for more in SHARED.values()]):
        environs = [SPEEDNET | TWO | settings[one] | more for one, more in shared]
        two = check(entrypoint, environs, "--nproc-per-node=2", "--oversubscribe=1")
        for environ, (one, _), losses in zip(environs, shared, two, strict=True):
            rounding = 1e-3 if {"TRAIN_PRECISION"} & environ.keys() else 1e-5
            assert not losses or losses == pytest.approx(learnt[one], rel=rounding), environ
