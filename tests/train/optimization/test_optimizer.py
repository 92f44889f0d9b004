"""Optimizers by name, with their arguments and groups, and the learning rate of every step."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.conftest import PYTHON, clean_environment, refusal, script
from tests.factories import train_settings
from train.checkpoint.optimizer_state import check_optimizer_state, load_optimizer_tensors, optimizer_tensors
from train.models.inspection import head_names
from train.models.registry import build_model
from train.optimization.optimizer import (
    UNSUPPORTED,
    block_depths,
    build_optimizer,
    find_optimizer,
    lr_factors,
    lr_schedule,
    optimizer_classes,
    parameter_names,
    parse_arguments,
    run_peak_lr,
    set_lr,
)
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
    assert len(build_optimizer(TrainSettings().with_values(optimizer="adam"), adam).param_groups) == 1


NOT_COMPILED = """
    import sys, torch
    from train.optimization.optimizer import build_optimizer
    from train.settings import TrainSettings
    for name in ("sgd", "adam", "adamw"):
        model = torch.nn.Linear(2, 1)
        optimizer = build_optimizer(TrainSettings().with_values(optimizer=name), model)
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
    group = build_optimizer(TrainSettings().with_values(momentum=0), nn.Linear(1, 1)).param_groups[0]
    assert (group["nesterov"], group["momentum"]) == (False, 0)


def rates(**settings: object) -> list[float]:
    lr = lr_schedule(train_settings({"lr": 1.0, **settings}).optim, 100)
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


def loads(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):
        return False
    return True


TIMM = [f"timm:{name}" for name in optimizer_classes("timm")] if loads("timm.optim") else []
USABLE = sorted({*optimizer_classes("torch"), *TIMM} - set(UNSUPPORTED))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 8), nn.Linear(8, 3))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 1, 8, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def test_usual_optimizers_are_known() -> None:
    assert {"sgd", "adam", "adamw", "rmsprop", "adagrad", "nadam", "radam", "adamax", "adafactor"} <= set(USABLE)


@pytest.mark.parametrize("name", USABLE)
def test_resumed_optimizer_is_bitwise_identical(name: str) -> None:
    settings = train_settings(optimizer=name)
    model = small_model()
    optimizer = build_optimizer(settings, model)
    steps(model, optimizer, 0, 3)
    saved = {key: one.clone() for key, one in optimizer_tensors(optimizer, parameter_names(optimizer, model)).items()}
    weights = {key: one.clone() for key, one in model.state_dict().items()}
    steps(model, optimizer, 3, 5)
    resumed = small_model()
    resumed.load_state_dict(weights)
    other = build_optimizer(settings, resumed)
    load_optimizer_tensors(other, parameter_names(other, resumed), saved)
    check_optimizer_state(other)
    steps(resumed, other, 3, 5)
    for key, one in model.state_dict().items():
        assert torch.equal(one, resumed.state_dict()[key]), key


@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("adamw", "betas=0.9,0.95 eps=1e-6", {"betas": (0.9, 0.95), "eps": 1e-6}),
        ("adam", "amsgrad=true", {"amsgrad": True}),
        ("RMSprop", "alpha=0.9  momentum=0.9", {"alpha": 0.9, "momentum": 0.9}),
        ("sgd", "dampening=0", {"dampening": 0}),
        ("timm:mars", "mars_type=lion", {"mars_type": "lion"}),
    ],
)
def test_arguments_reach_the_optimizer(name: str, text: str, wanted: dict[str, object]) -> None:
    settings = train_settings(optimizer=name, optimizer_args=text)
    group = build_optimizer(settings, small_model()).param_groups[0]
    assert {key: group[key] for key in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("adamv", "", "no such optimizer. Did you mean adam"),
        ("lbfgs", "", "needs a closure"),
        ("sparseadam", "", "is for sparse gradients"),
        ("adamw", "beta=0.9", "beta=0.9 is no argument of AdamW. Did you mean betas"),
        ("adamw", "betas", "betas has no value. Write betas=value"),
        ("adamw", "lr=0.1", "TRAIN_LR sets it"),
        ("adamw", "eps=1e-6 eps=1e-7", "eps is there twice. Leave one out."),
        ("sgd", "momentum=0.1", "TRAIN_MOMENTUM sets it"),
        ("adamw", "eps=small", "small is no number"),
        ("adamw", "betas=0.9;0.95", "is no number"),
    ],
)
def test_wrong_optimizer_is_one_line(name: str, text: str, said: str) -> None:
    settings = train_settings(optimizer=name, optimizer_args=text)
    message = refusal(lambda: parse_arguments(settings.optim, find_optimizer(settings.optim)))
    assert said in message
    assert message.startswith("TRAIN_OPTIMIZER")


@pytest.mark.parametrize("text", ["betas=2,3", "betas=0.9", "eps=-1"])
def test_values_that_the_optimizer_refuses_are_one_line(text: str) -> None:
    refusal(
        build_optimizer,
        train_settings(optimizer="adamw", optimizer_args=text),
        small_model(),
        match=r"^TRAIN_OPTIMIZER_ARGS=.*AdamW refuses them",
    )


@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.05), ("adamw", 0.001), ("rmsprop", 0.01), ("adadelta", 1.0)])
def test_default_learning_rate_is_the_optimizers_own(name: str, rate: float) -> None:
    assert run_peak_lr(train_settings(optimizer=name).optim) == rate


@pytest.mark.usefixtures("torchvision")
def test_norms_and_biases_without_weight_decay() -> None:
    model = build_model(train_settings(model="resnet18").network, (3, 32, 32), 5)
    groups = build_optimizer(train_settings(weight_decay=0.1, decay_norms=False), model).param_groups
    decayed = {one.ndim > 1: group["weight_decay"] for group in groups for one in group["params"]}
    assert decayed == {True: 0.1, False: 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.usefixtures("torchvision")
def test_layer_decay_lowers_the_rate_towards_the_input() -> None:
    model = build_model(train_settings(model="resnet18").network, (3, 32, 32), 5)
    head = head_names(model, 5)
    factors = lr_factors(train_settings(lr=0.1, lr_layer_decay=0.5, head_lr=0.3).optim, model, head)
    assert factors["fc.weight"] == pytest.approx(3.0)
    ordered = [factors[f"layer{stage}.{block}.conv1.weight"] for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == 8
    assert factors["layer4.1.bn2.bias"] == factors["layer4.1.conv1.weight"] == 0.5
    assert factors["conv1.weight"] == factors["bn1.weight"] == min(factors.values())


@pytest.mark.usefixtures("torchvision")
@pytest.mark.slow_except("densenet121")
@pytest.mark.parametrize("name", ["vit_b_16", "convnext_tiny", "swin_t", "densenet121", "cnn", "speednet"])
def test_blocks_of_other_models_are_in_order(name: str) -> None:
    side = 224 if name == "vit_b_16" else 32
    model = build_model(train_settings(model=name).network, (3, side, side), 5)
    depths = list(block_depths(model, head_names(model, 5)).values())
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert len(set(depths)) > 1
