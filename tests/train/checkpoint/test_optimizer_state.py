"""The optimizer's state goes by the names of parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.factories import train_settings
from train.checkpoint.optimizer_state import check_optimizer_state, load_optimizer_tensors, optimizer_tensors
from train.models.registry import build_model
from train.optimization.optimizer import build_optimizer, parameter_names, set_lr
from train.settings import TrainSettings


def stepped(settings: TrainSettings) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after three steps."""
    torch.manual_seed(0)
    model = build_model(settings.network, (1, 8, 8), 10)
    optimizer = build_optimizer(settings, model)
    for _ in range(3):
        set_lr(optimizer, 0.01)
        optimizer.zero_grad()
        model(torch.randn(4, 1, 8, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def test_hyperparameters_come_from_the_settings() -> None:
    saved = train_settings(weight_decay=0.1, momentum=0.9)
    model, optimizer = stepped(saved)
    tensors = optimizer_tensors(optimizer, parameter_names(optimizer, model))
    now = train_settings(weight_decay=0.3, momentum=0.5)
    other_model, other = stepped(now)
    load_optimizer_tensors(other, parameter_names(other, other_model), tensors)
    assert (other.param_groups[0]["weight_decay"], other.param_groups[0]["momentum"]) == (0.3, 0.5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"nobody.exp_avg": torch.zeros(3)}, "no parameter nobody"),
        ({"conv.exp_avg": torch.zeros(3)}, "no parameter conv"),
    ],
)
def test_tensors_of_no_parameter_are_refused(change: dict[str, torch.Tensor], said: str) -> None:
    settings = train_settings(optimizer="adam")
    model, optimizer = stepped(settings)
    names = parameter_names(optimizer, model)
    with pytest.raises(ValueError, match=said):
        load_optimizer_tensors(optimizer, names, {**optimizer_tensors(optimizer, names), **change})


def test_state_that_is_not_complete_is_refused() -> None:
    settings = train_settings(optimizer="adam")
    model, optimizer = stepped(settings)
    names = parameter_names(optimizer, model)
    tensors = optimizer_tensors(optimizer, names)
    load_optimizer_tensors(optimizer, names, {name: one for name, one in tensors.items() if "exp_avg_sq" not in name})
    with pytest.raises(ValueError, match="its optimizer state has no exp_avg_sq"):
        check_optimizer_state(optimizer)
    load_optimizer_tensors(optimizer, names, {**tensors, f"{names[0]}.exp_avg": torch.zeros(7)})
    with pytest.raises(ValueError, match="has the shape of no parameter"):
        check_optimizer_state(optimizer)


def test_missing_momentum_of_one_parameter_starts_at_zero() -> None:
    settings = train_settings(optimizer="sgd")
    model, optimizer = stepped(settings)
    names = parameter_names(optimizer, model)
    tensors = dict(optimizer_tensors(optimizer, names))
    del tensors[f"{names[0]}.momentum_buffer"]
    load_optimizer_tensors(optimizer, names, tensors)
    check_optimizer_state(optimizer)
    first = optimizer.param_groups[0]["params"][0]
    assert not optimizer.state[first]["momentum_buffer"].any()
    model(torch.randn(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
