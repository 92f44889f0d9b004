"""BatchNorm cannot be trained on a single value: such runs are refused before the first step."""

from __future__ import annotations

import pytest

from tests.conftest import Entrypoint, needs_two_cores

pytestmark = pytest.mark.launch
IMAGES = {
    "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_IMAGES": "40", "TRAIN_MODEL": "resnet18", "TRAIN_STEPS": "1",
    "LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0",
}  # fmt: skip
RANKS = {"LAUNCH_NPROC_PER_NODE": "2"}


@pytest.mark.slow_except("env0")
@pytest.mark.parametrize(
    ("env", "least"),
    [
        ({"TRAIN_BATCH_SIZE": "1"}, 2),
        ({"TRAIN_BATCH_SIZE": "8", "TRAIN_GRAD_ACCUM_STEPS": "8"}, 16),
        pytest.param({"TRAIN_BATCH_SIZE": "2", "TRAIN_SYNC_BATCHNORM": "0", **RANKS}, 4, marks=needs_two_cores),
        pytest.param(
            {"TRAIN_BATCH_SIZE": "3", "TRAIN_SYNC_BATCHNORM": "0", **RANKS},
            4,
            marks=[needs_two_cores, pytest.mark.slow],
        ),
    ],
)
def test_batchnorm_on_one_image_is_refused_before_training(
    entrypoint: Entrypoint, env: dict[str, str], least: int
) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    result = entrypoint("train", env=IMAGES | env)
    assert result.code == 2, result.err
    (line,) = result.error_lines
    assert f"TRAIN_BATCH_SIZE={env['TRAIN_BATCH_SIZE']}: resnet18 needs 2 images per micro-batch" in line
    assert line.endswith(f"Set at least {least}.")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "env",
    [
        {"TRAIN_BATCH_SIZE": "1", "TRAIN_SYNTHETIC_SHAPE": "3x64x64"},
        pytest.param({"TRAIN_BATCH_SIZE": "2", **RANKS}, marks=needs_two_cores),
    ],
)
@pytest.mark.slow
def test_batches_that_batchnorm_can_take_are_trained(entrypoint: Entrypoint, env: dict[str, str]) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    assert entrypoint.train(env=IMAGES | env)["steps"] == 1
