"""How images and filters lie in memory."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.factories import train_settings
from train.acceleration.amp import memory_format, set_memory_format
from train.acceleration.torch_workarounds import match_optimizer_state_format
from train.optimization.optimizer import build_optimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 2, 3)
    )


@pytest.mark.parametrize("channels_last", [True, False])
def test_filters_and_outputs_have_the_format_and_values_stay(channels_last: bool) -> None:
    wanted = memory_format(channels_last=channels_last)
    laid = set_memory_format(model(), channels_last=channels_last)
    for mine, theirs in zip(laid.parameters(), model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dim() == 1 or mine.is_contiguous(memory_format=wanted)
    out = laid[0](torch.randn(2, 4, 8, 8).to(memory_format=wanted))
    assert out.is_contiguous(memory_format=wanted)


@pytest.mark.parametrize("channels_last", [True, False])
def test_gradients_have_the_strides_of_their_filters(channels_last: bool) -> None:
    # DDP copies a gradient once more where its strides are others.
    laid = set_memory_format(model(), channels_last=channels_last)
    laid(torch.randn(2, 4, 8, 8).to(memory_format=memory_format(channels_last=channels_last))).sum().backward()
    for one in laid.parameters():
        assert one.grad is not None
        assert one.grad.stride() == one.stride()


def next_step(laid: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    laid(torch.linspace(-1, 1, 2 * 4 * 64).view(2, 4, 8, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_optimizer_state_matches_other_memory_format(name: str, before: bool, after: bool) -> None:
    settings = train_settings({"optimizer": name, "lr": 0.01})
    old = set_memory_format(model(), channels_last=before)
    optimizer = build_optimizer(settings, old)
    for _ in range(2):
        next_step(old, optimizer)
    new = set_memory_format(deepcopy(old), channels_last=after)
    goes_on = build_optimizer(settings, new)
    goes_on.load_state_dict(deepcopy(optimizer.state_dict()))
    match_optimizer_state_format(goes_on)
    next_step(old, optimizer)
    next_step(new, goes_on)
    for mine, theirs in zip(new.parameters(), old.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
