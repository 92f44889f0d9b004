"""Number formats: what is computed in which."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tests.train.engine.learners import X, Y, trainer, weights
from train.acceleration.amp import autocast, configure_tf32
from train.data.feeds.batches import Batch

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
