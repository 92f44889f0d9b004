"""Optimizers by name: built with their arguments, and resumed to the same bits."""

from __future__ import annotations

import importlib

import pytest
import torch
from torch import nn

from entrypoint.core.errors import UserError
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
    optimizer_classes,
    parameter_names,
    parse_arguments,
    run_peak_lr,
)


def loads(package: str) -> bool:
    try:
        importlib.import_module(package)
    except (ImportError, RuntimeError):
        return False
    return True


HAS_TORCHVISION = loads("torchvision")
needs_torchvision = pytest.mark.skipif(not HAS_TORCHVISION, reason="torchvision cannot be loaded")
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
        ("sgd", "momentum=0.1", "TRAIN_MOMENTUM sets it"),
        ("adamw", "eps=small", "small is no number"),
        ("adamw", "betas=0.9;0.95", "is no number"),
    ],
)
def test_wrong_optimizer_is_one_line(name: str, text: str, said: str) -> None:
    settings = train_settings(optimizer=name, optimizer_args=text)
    with pytest.raises(UserError) as caught:
        parse_arguments(settings, find_optimizer(settings))
    assert said in str(caught.value)
    assert str(caught.value).startswith("TRAIN_OPTIMIZER")


@pytest.mark.parametrize("text", ["betas=2,3", "betas=0.9", "eps=-1"])
def test_values_that_the_optimizer_refuses_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match=r"^TRAIN_OPTIMIZER_ARGS=.*AdamW refuses them"):
        build_optimizer(train_settings(optimizer="adamw", optimizer_args=text), small_model())


@pytest.mark.parametrize(("name", "rate"), [("sgd", 0.05), ("adamw", 0.001), ("rmsprop", 0.01), ("adadelta", 1.0)])
def test_default_learning_rate_is_the_optimizers_own(name: str, rate: float) -> None:
    assert run_peak_lr(train_settings(optimizer=name)) == rate


@needs_torchvision
def test_norms_and_biases_without_weight_decay() -> None:
    model = build_model(train_settings(model="resnet18"), (3, 32, 32), 5)
    groups = build_optimizer(train_settings(weight_decay=0.1, decay_norms=False), model).param_groups
    decayed = {one.ndim > 1: group["weight_decay"] for group in groups for one in group["params"]}
    assert decayed == {True: 0.1, False: 0.0}
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@needs_torchvision
def test_layer_decay_lowers_the_rate_towards_the_input() -> None:
    model = build_model(train_settings(model="resnet18"), (3, 32, 32), 5)
    head = head_names(model, 5)
    factors = lr_factors(train_settings(lr=0.1, lr_layer_decay=0.5, head_lr=0.3), model, head)
    assert factors["fc.weight"] == pytest.approx(3.0)
    ordered = [factors[f"layer{stage}.{block}.conv1.weight"] for stage in (1, 2, 3, 4) for block in (0, 1)]
    assert ordered == sorted(ordered)
    assert len(set(ordered)) == 8
    assert factors["layer4.1.bn2.bias"] == factors["layer4.1.conv1.weight"] == 0.5
    assert factors["conv1.weight"] == factors["bn1.weight"] == min(factors.values())


@needs_torchvision
@pytest.mark.slow_except("densenet121")
@pytest.mark.parametrize("name", ["vit_b_16", "convnext_tiny", "swin_t", "densenet121", "cnn", "speednet"])
def test_blocks_of_other_models_are_in_order(name: str) -> None:
    side = 224 if name == "vit_b_16" else 32
    model = build_model(train_settings(model=name), (3, side, side), 5)
    depths = list(block_depths(model, head_names(model, 5)).values())
    assert depths == sorted(depths)
    assert depths[0] == 0
    assert len(set(depths)) > 1
