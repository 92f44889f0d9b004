"""Optimizers by name and the learning rate of every step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import PYTHON, clean_environment, script
from tests.factories import train_settings
from train.optimization.optimizer import build_optimizer, lr_schedule, set_lr
from train.settings import TrainSettings


def one_step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Take a step by gradients of one; return what it changed."""
    settings = train_settings({"optimizer": "sgd", "momentum": 0, "weight_decay": 0.5, "lr": 0.1})
    optimizer = build_optimizer(settings, model)
    set_lr(optimizer, 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {name: parameter.detach() - before[name] for name, parameter in model.named_parameters()}


def test_lr_multipliers_scale_lr_not_weight_decay() -> None:
    model = nn.Linear(1, 1)
    nn.init.constant_(model.weight, 2.0)
    nn.init.constant_(model.bias, 2.0)
    model.lr_multipliers = {"bias": 4.0}
    change = one_step(model)
    assert change["weight"].item() == pytest.approx(-0.1 * (1 + 0.5 * 2))
    assert change["bias"].item() == pytest.approx(-0.1 * (4 + 0.5 * 2))
    adam = nn.Linear(1, 1)
    adam.lr_multipliers = {"bias": 4.0}
    assert len(build_optimizer(TrainSettings(optimizer="adam"), adam).param_groups) == 1


NOT_COMPILED = """
    import sys, torch
    from train.optimization.optimizer import build_optimizer
    from train.settings import TrainSettings
    for name in ("sgd", "adam", "adamw"):
        model = torch.nn.Linear(2, 1)
        optimizer = build_optimizer(TrainSettings(optimizer=name), model)
        model(torch.ones(1, 2)).sum().backward()
        before = model.weight.clone()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
        assert not torch.equal(model.weight, before)
        assert all(value.grad_fn is None for state in optimizer.state.values() for value in state.values())
    print("torch._dynamo" in sys.modules)
"""


@pytest.mark.versions
@pytest.mark.launch
def test_eager_run_does_not_import_the_compiler(tmp_path: Path) -> None:
    file = script(tmp_path, "optim.py", NOT_COMPILED)
    done = subprocess.run([PYTHON, file], check=True, capture_output=True, text=True, env=clean_environment())
    assert done.stdout == "False\n"


def test_sgd_has_nesterov_momentum_unless_there_is_no_momentum() -> None:
    group = build_optimizer(TrainSettings(), nn.Linear(1, 1)).param_groups[0]
    assert (group["nesterov"], group["momentum"]) == (True, 0.9)
    group = build_optimizer(TrainSettings(momentum=0), nn.Linear(1, 1)).param_groups[0]
    assert (group["nesterov"], group["momentum"]) == (False, 0)


def rates(**settings: object) -> list[float]:
    lr = lr_schedule(train_settings({"lr": 1.0, **settings}), 100, 10)
    return [lr(step) for step in range(100)]


def test_onecycle_rises_for_a_quarter_and_falls_to_nothing() -> None:
    lr = rates(schedule="onecycle")
    assert max(lr) == lr[25] == pytest.approx(1.0)
    assert lr[0] < 0.05
    assert lr[99] == pytest.approx(1 / 75)
    assert sorted(lr[:26]) == lr[:26]
    assert sorted(lr[25:], reverse=True) == lr[25:]


def test_cosine_falls_from_the_peak() -> None:
    lr = rates(schedule="cosine")
    assert lr[0] == pytest.approx(1.0)
    assert lr[50] == pytest.approx(0.5)
    assert lr[99] < 0.001


def test_constant_stays_after_its_warm_up() -> None:
    lr = rates(schedule="constant", warmup=0.1)
    assert lr[0] < 0.1
    assert lr[10:] == [1.0] * 90
