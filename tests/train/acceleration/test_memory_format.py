"""How images and filters lie in memory."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn

from tests.factories import train_settings
from train.acceleration.memory_format import memory_format, set_memory_format
from train.acceleration.torch_workarounds import match_optimizer_state_format
from train.engine.optimizer import build_optimizer


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.Conv2d(8, 2, 3)
    )


PLAIN, LAST = "plain", "last"


def order_of(filters: torch.Tensor) -> str:
    """Tell which dimension is innermost, by the strides, which say it also of filters of one pixel."""
    return PLAIN if filters.stride(3) == 1 else LAST


@pytest.mark.parametrize(
    ("channels_last", "contiguous_weights", "ddp", "orders"),
    [
        (True, True, False, [PLAIN, PLAIN, LAST, PLAIN]),
        (True, True, True, [PLAIN, LAST, LAST, PLAIN]),
        (True, False, False, [LAST, LAST, LAST, LAST]),
        (False, True, False, [PLAIN, PLAIN, PLAIN, PLAIN]),
        (False, False, True, [PLAIN, PLAIN, PLAIN, PLAIN]),
    ],
)
def test_only_dense_filters_stay_contiguous(
    channels_last: bool, contiguous_weights: bool, ddp: bool, orders: list[str]
) -> None:
    laid = set_memory_format(model(), channels_last=channels_last, contiguous_weights=contiguous_weights, ddp=ddp)
    filters = [module.weight for module in laid.modules() if isinstance(module, nn.Conv2d)]
    depthwise = filters.pop(2)
    assert [order_of(one) for one in filters] == [one for index, one in enumerate(orders) if index != 2]
    assert depthwise.is_contiguous(memory_format=memory_format(channels_last=orders[2] == LAST))


def test_set_memory_format_keeps_values_and_image_format() -> None:
    laid = set_memory_format(model(), channels_last=True, contiguous_weights=True)
    for mine, theirs in zip(laid.parameters(), model().parameters(), strict=True):
        assert torch.equal(mine, theirs)
    out = laid[0](torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last))
    assert out.is_contiguous(memory_format=torch.channels_last)


def test_dense_filter_gradients_have_the_filters_layout() -> None:
    laid = set_memory_format(model(), channels_last=True, contiguous_weights=True)
    laid(torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last)).sum().backward()
    for module in laid.modules():
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1):
            assert module.weight.grad is not None
            assert module.weight.grad.stride() == module.weight.stride()


def next_step(laid: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    laid(torch.linspace(-1, 1, 2 * 4 * 64).view(2, 4, 8, 8)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_optimizer_state_matches_other_memory_format(name: str, before: bool, after: bool) -> None:
    settings = train_settings({"optimizer": name, "lr": 0.01})
    old = set_memory_format(model(), channels_last=before, contiguous_weights=False)
    optimizer = build_optimizer(settings, old)
    for _ in range(2):
        next_step(old, optimizer)
    new = set_memory_format(deepcopy(old), channels_last=after, contiguous_weights=False)
    goes_on = build_optimizer(settings, new)
    goes_on.load_state_dict(deepcopy(optimizer.state_dict()))
    match_optimizer_state_format(goes_on)
    next_step(old, optimizer)
    next_step(new, goes_on)
    for mine, theirs in zip(new.parameters(), old.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
