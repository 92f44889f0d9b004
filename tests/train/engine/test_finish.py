"""The summary's digest of the weights."""

from __future__ import annotations

import torch
from torch import nn

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
