"""How ranks share gradients: each way for real, and what it costs in exactness."""

from __future__ import annotations

import pytest

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


@pytest.mark.versions
def test_two_ranks_equal_one_rank(entrypoint: Entrypoint, whole: list[float]) -> None:
    more = {"TRAIN_DDP_FIND_UNUSED_PARAMETERS": "1", "TRAIN_GRAD_ACCUM_STEPS": "2"}
    entrypoint.train(env=COMMON | TWO_RANKS | more)
    assert losses(entrypoint) == pytest.approx(whole, rel=1e-3)
