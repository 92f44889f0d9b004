"""Formats of numbers and of memory: what is computed in which, and that no value changes by it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.factories import train_settings
from tests.train.engine.learners import X, Y, trainer, weights
from train.acceleration.amp import autocast, configure_tf32, memory_format, set_memory_format
from train.acceleration.torch_workarounds import match_optimizer_state_format
from train.data.feeds.batches import Batch
from train.optimization.optimizer import build_optimizer

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_activations_have_the_precision_and_weights_stay_fp32(precision: str, dtype: torch.dtype) -> None:
    one = trainer()
    one.precision, one.state.scaler = precision, GradScaler("cpu", enabled=precision == "fp16")
    seen = []
    one.state.model.register_forward_hook(lambda _, __, output: seen.append(output.dtype))
    one.train_step(Batch(((X, Y),), 12))
    assert seen == [dtype]
    assert {parameter.dtype for parameter in one.state.model.parameters()} == {torch.float32}


def test_fp16_scales_the_loss_and_steps_as_fp32_does() -> None:
    plain, scaled = trainer(max_grad_norm=0.5), trainer(max_grad_norm=0.5)
    scaled.precision, scaled.state.scaler = "fp16", GradScaler("cpu")
    assert scaled.state.scaler.get_scale() > 1000
    for one in (plain, scaled):
        one.train_step(Batch(((X[:7], Y[:7]), (X[7:], Y[7:])), 12))
    assert torch.allclose(weights(plain), weights(scaled), atol=2e-3)


def test_infinite_gradients_skip_the_step_and_lower_the_scale() -> None:
    one = trainer()
    one.precision, one.state.scaler = "fp16", GradScaler("cpu")
    before, scale = weights(one).clone(), one.state.scaler.get_scale()
    one.state.model.register_forward_hook(lambda _, __, output: output * 1e30)
    one.train_step(Batch(((X, Y),), 12))
    assert torch.equal(weights(one), before)
    assert one.state.scaler.get_scale() < scale


def test_momentum_after_skipped_first_step_is_next_gradient() -> None:
    left_out, plain = trainer(fused=False), trainer(fused=False)
    left_out.precision, left_out.state.scaler = "fp16", GradScaler("cpu")
    first = left_out.state.model.register_forward_hook(lambda _, __, output: output * 1e30)
    left_out.train_step(Batch(((X, Y),), 12))
    first.remove()
    for one in (left_out, plain):
        for _ in range(2):
            one.train_step(Batch(((X, Y),), 12))
    assert torch.allclose(weights(left_out), weights(plain), atol=2e-3)


def test_tf32_is_set_for_products_and_restored_afterwards() -> None:
    configure_tf32("tf32", CPU)
    assert torch.get_float32_matmul_precision() == "high"
    configure_tf32("fp32", CPU)
    assert torch.get_float32_matmul_precision() == "highest"
    with autocast("fp32", CPU):
        assert nn.Linear(4, 3)(X).dtype == torch.float32


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
