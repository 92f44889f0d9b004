"""How ranks share gradients: each way for real, and what it costs in exactness."""

from __future__ import annotations

import re

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, needs_two_cores
from tests.train.given import SMALL, TWO_RANKS, losses

pytestmark = [pytest.mark.launch, needs_two_cores]
COMMON = SMALL | {"TRAIN_EPOCHS": "2", "TRAIN_BATCH_SIZE": "40", "TRAIN_LR": "0.02", "TRAIN_CHECKPOINT_EVERY": "0"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one rank."""
    alone = Entrypoint(tmp_path_factory.mktemp("alone"))
    alone.train(env=COMMON)
    return losses(alone)


@pytest.mark.slow_except("more0")
@pytest.mark.versions
@pytest.mark.parametrize(
    ("more", "to"),
    [
        ({"TRAIN_DDP_FIND_UNUSED_PARAMETERS": "1", "TRAIN_GRAD_ACCUM_STEPS": "2"}, 1e-3),
        ({"TRAIN_GRADIENT_COMPRESSION": "fp16"}, 1e-2),
        ({"TRAIN_GRADIENT_COMPRESSION": "bf16"}, 3e-2),
    ],
)
def test_two_ranks_equal_one_rank(entrypoint: Entrypoint, whole: list[float], more: dict[str, str], to: float) -> None:
    result = entrypoint("train", env=COMMON | TWO_RANKS | more | {"TRAIN_TENSORBOARD": "0"})
    if more == {"TRAIN_GRADIENT_COMPRESSION": "bf16"} and result.code == ExitCode.MACHINE:
        error = r"TRAIN_GRADIENT_COMPRESSION=bf16: torch \S+ does not support it here \(.*NCCL.*\)\. Set fp16\."
        assert re.fullmatch(f"entrypoint: error: {error}", result.error_lines[0])
        return
    assert result.code == 0, result.err
    assert losses(entrypoint) == pytest.approx(whole, rel=to)
    if to > 1e-3:
        assert losses(entrypoint) != pytest.approx(whole, rel=1e-7), (
            "something is lost on the way, or nothing was compressed"
        )
