"""A frozen backbone: its features are computed once where nothing changes the images, and all else stays as it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.conftest import Entrypoint, needs_two_cores
from tests.train.given import TWO_RANKS, losses
from tests.train.started import Started

pytestmark = pytest.mark.launch

MODULE = """
import time
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, in_channels=1):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(in_channels, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
        )
        self.drop = nn.Identity()
        self.head = nn.Linear(32, num_classes)

    def forward(self, images):
        return self.head(self.drop(self.body(images)))

class Twice(Net):  # the same numbers, but the layer's inputs are not all that it needs
    def forward(self, images):
        super().forward(images)
        return super().forward(images)

class Dropout(Net):
    def __init__(self, num_classes, in_channels=1):
        super().__init__(num_classes, in_channels)
        self.drop = nn.Dropout(0.1)

class Scaled(Net):
    def forward(self, images):
        return 2 * super().forward(images)

class ByName(Net):
    def forward(self, images):
        return self.head(input=self.body(images))

class Zeros(Net):
    def __init__(self, num_classes, in_channels=1):
        super().__init__(num_classes, in_channels)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

class ZerosDropout(Zeros, Dropout):
    pass

class ZerosScaled(Zeros, Scaled):
    pass

class Slow(Net):
    def forward(self, images):
        time.sleep(0.1)
        return super().forward(images)
"""
ONCE = "computing the frozen backbone's features once, 32 numbers an image"


@pytest.fixture
def frozen(entrypoint: Entrypoint) -> dict[str, str]:
    """Return the environment of a run whose backbone is frozen, on digits."""
    (entrypoint.folder / "own_net.py").write_text(MODULE)
    return {
        "TRAIN_DATASET": "digits", "TRAIN_MODEL": "own_net:Net", "TRAIN_MODEL_PATH": str(entrypoint.folder),
        "TRAIN_FREEZE": "backbone", "TRAIN_EPOCHS": "3", "TRAIN_LR": "0.1", "TRAIN_TENSORBOARD": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"TRAIN_EMA_DECAY": "0.9", "TRAIN_VAL_SPLIT": "0.1"},
        pytest.param(TWO_RANKS | {"TRAIN_GRAD_ACCUM_STEPS": "2"}, marks=needs_two_cores),
    ],
)
def test_run_equals_one_that_computes_all(entrypoint: Entrypoint, frozen: dict[str, str], more: dict[str, str]) -> None:
    summaries = []
    for name in ("Net", "Twice"):
        result = entrypoint("train", f"--model=own_net:{name}", f"--run-name={name}", env=frozen | more)
        assert result.code == 0, result.err
        assert (ONCE in result.out) is (name == "Net")
        summaries.append(entrypoint.summary(name))
    assert losses(entrypoint, "Net") == pytest.approx(losses(entrypoint, "Twice"), abs=1e-4)
    once, whole = summaries
    assert once["test_accuracy"] == pytest.approx(whole["test_accuracy"], abs=0.3)
    assert once["test_images"] == whole["test_images"]


@needs_two_cores
def test_streams_and_ranks_learn_the_same(entrypoint: Entrypoint, frozen: dict[str, str], image_folder: Path) -> None:
    folder = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(image_folder), "TRAIN_BATCH_SIZE": "4"}
    for source, ranks in (("stream", {}), ("stream", TWO_RANKS), ("memory", {})):
        more = folder | ranks | {"TRAIN_DATA_SOURCE": source, "TRAIN_TRANSFORMS": "none", "TRAIN_NORMALIZE": "imagenet"}
        result = entrypoint("train", f"--run-name={source}{len(ranks)}", env=frozen | more)
        assert ONCE in result.out, result.err
    expected = losses(entrypoint, "memory0")
    assert losses(entrypoint, "stream0") == pytest.approx(expected, abs=1e-4)
    assert losses(entrypoint, "stream1") == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "more",
    [
        {"TRAIN_MODEL": "own_net:Dropout"},
        {"TRAIN_MODEL": "own_net:Scaled"},
        {"TRAIN_MODEL": "own_net:ZerosDropout"},
        {"TRAIN_MODEL": "own_net:ZerosScaled"},
        {"TRAIN_MODEL": "own_net:ByName"},
        {"TRAIN_FREEZE": "body.1"},
        {"TRAIN_TRANSFORMS": "flip-crop"},
        {"TRAIN_MIXUP_ALPHA": "0.2"},
        {"TRAIN_EPOCHS": "1"},
    ],
)
def test_images_that_change_are_computed_each_time(
    entrypoint: Entrypoint, frozen: dict[str, str], more: dict[str, str]
) -> None:
    result = entrypoint("train", env=frozen | {"TRAIN_EPOCHS": "2"} | more)
    assert result.code == 0, result.err
    assert "features once" not in result.out


def test_balance_draws_by_the_classes_of_unreadable_images_too(
    entrypoint: Entrypoint, frozen: dict[str, str], image_folder: Path
) -> None:
    broken = next((image_folder / "train/class0").iterdir())
    broken.write_bytes(broken.read_bytes()[:60])
    env = frozen | {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(image_folder), "TRAIN_BATCH_SIZE": "4",
        "TRAIN_DATA_SOURCE": "stream", "TRAIN_TRANSFORMS": "none", "TRAIN_BALANCE": "1",
        "TRAIN_ON_UNREADABLE_IMAGE": "skip", "TRAIN_NORMALIZE": "imagenet",
    }  # fmt: skip
    for name in ("Zeros", "Twice"):
        result = entrypoint("train", f"--model=own_net:{name}", f"--run-name={name}", env=env)
        assert result.code == 0, result.err
        assert (ONCE in result.out) is (name == "Zeros")
    assert entrypoint.summary("Zeros")["images_skipped"] == entrypoint.summary("Twice")["images_skipped"] == 1


def test_run_stopped_while_it_computes_features_resumes(entrypoint: Entrypoint, frozen: dict[str, str]) -> None:
    slow = frozen | {"TRAIN_MODEL": "own_net:Slow", "TRAIN_EVAL_BATCH_SIZE": "64", "TRAIN_RUN_NAME": "slow"}
    run = Started(entrypoint, slow)
    run.wait_for("computing the frozen")
    run.process.send_signal(signal.SIGTERM)
    code, _, err = run.ended()
    assert code == 75, err
    assert "stopped by SIGTERM: step 0 is saved" in err
    again = entrypoint.train("--resume=auto", env=slow)
    straight = entrypoint.train("--run-name=straight", env=slow)
    assert again["weights_sha256"] == straight["weights_sha256"]


def test_resumed_run_has_the_same_bits(entrypoint: Entrypoint, frozen: dict[str, str]) -> None:
    frozen |= {"TRAIN_MODEL": "own_net:Zeros"}
    straight = entrypoint.train("--run-name=straight", env=frozen | {"TRAIN_EPOCHS": "4"})
    cut = frozen | {"TRAIN_EPOCHS": "4", "TRAIN_RUN_NAME": "cut"}
    entrypoint.train("--keep-checkpoints=9", env=cut)
    newest, *_ = sorted((entrypoint.folder / "runs/cut/checkpoint").glob("step-*"), reverse=True)
    for path in sorted((entrypoint.folder / "runs/cut/checkpoint").glob("step-*"))[2:]:
        path.rename(path.with_name(f"kept-{path.name}"))
    assert newest.name not in {path.name for path in (entrypoint.folder / "runs/cut/checkpoint").iterdir()}
    result = entrypoint("train", "--resume=auto", env=cut)
    assert ONCE in result.out, result.err
    assert entrypoint.summary("cut")["weights_sha256"] == straight["weights_sha256"]
