"""The summary's digest of the weights, and weights that have none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint
from train.engine.finish import weights_sha256


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def test_digest_depends_on_values_and_names_only() -> None:
    one = model()
    assert weights_sha256(one.state_dict()) == weights_sha256(model().state_dict())
    last = model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert weights_sha256(last.state_dict()) == weights_sha256(one.state_dict())
    with torch.no_grad():
        one[0].weight[0, 0, 0, 0] += 1e-7  # type: ignore[index]
    assert weights_sha256(one.state_dict()) != weights_sha256(model().state_dict())
    assert weights_sha256(nn.Sequential(model()[0]).state_dict()) != weights_sha256(model().state_dict())  # type: ignore[index]


@pytest.mark.launch
def test_last_step_that_breaks_a_weight_fails(entrypoint: Entrypoint) -> None:
    env = {"TRAIN_LR": "1e308", "TRAIN_STEPS": "1", "TRAIN_CHECKPOINT_EVERY": "0", "LAUNCH_QUIET": "1"}
    result = entrypoint("train", env=env)
    assert result.code == ExitCode.RANK_FAILED
    assert "is not finite. Lower TRAIN_LR" in result.err
