"""Create the optimizer, the learning-rate schedule and the EMA model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.acceleration.torch_workarounds import skip_dynamo_import, unwrap_step
from train.settings import TrainSettings

# Peak learning rates for the CNN on CIFAR-10 and digits at the default batch size.
DEFAULT_LR = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001}
ONECYCLE_WARMUP = 0.25


def build_optimizer(settings: TrainSettings, model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    """Return the optimizer; `set_lr` sets its learning rate before each step.

    Do not fuse it for scaled fp16 gradients. They usually overflow in the first step, which is skipped. torch 2.8's
    fused SGD leaves momentum uninitialized then.
    """
    lr = peak_lr(settings)
    common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": fused}
    parameters = parameter_groups(settings, model)
    if settings.compile == "off":
        skip_dynamo_import()
    optimizer: torch.optim.Optimizer
    if settings.optimizer == "sgd":
        nesterov = settings.momentum > 0
        optimizer = torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=nesterov, **common)
    else:
        kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
        optimizer = kind(parameters, **common)
    if settings.compile == "off":
        unwrap_step(optimizer)
    return optimizer


def parameter_groups(settings: TrainSettings, model: nn.Module) -> list[Any]:
    """Return the trainable parameters, grouped by learning-rate multiplier if the model defines `lr_multipliers`.

    Multipliers apply to SGD only. The weight decay per step is the same in all groups.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    rates: Mapping[str, float] = getattr(model, "lr_multipliers", {}) if settings.optimizer == "sgd" else {}
    if not rates:
        return list(named.values())
    return [
        {
            "params": [parameter for name, parameter in named.items() if rates.get(name, 1.0) == rate],
            "rate": rate,
            "weight_decay": settings.weight_decay / rate,
        }
        for rate in sorted({rates.get(name, 1.0) for name in named})
    ]


def parameter_names(settings: TrainSettings, model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters in the order in which the optimizer has them."""
    named = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    rates: Mapping[str, float] = getattr(model, "lr_multipliers", {}) if settings.optimizer == "sgd" else {}
    return sorted(named, key=lambda name: rates.get(name, 1.0)) if rates else named


def peak_lr(settings: TrainSettings) -> float:
    """Return the peak learning rate of the run."""
    return DEFAULT_LR[settings.optimizer] if settings.lr == "auto" else settings.lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every parameter group, multiplied by the group's `rate`."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("rate", 1.0)


def lr_schedule(settings: TrainSettings, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It depends on nothing else, so a resumed run continues with the same rates. One-cycle is piecewise linear
    (Smith, 2018, arXiv:1803.09820). Cosine follows SGDR (arXiv:1608.03983).
    """
    peak = peak_lr(settings)
    share = settings.warmup
    if share == "auto":
        share = ONECYCLE_WARMUP if settings.schedule == "onecycle" else 0.0
    warm_steps = share * total_steps

    def lr(step: int) -> float:
        if step < warm_steps:
            return peak * (step + 1) / (warm_steps + 1)
        left = (total_steps - step) / max(1.0, total_steps - warm_steps)
        if settings.schedule == "onecycle":
            return peak * left
        if settings.schedule == "cosine":
            return peak * 0.5 * (1 + math.cos(math.pi * (1 - left)))
        return peak

    return lr


def make_ema(model: nn.Module, settings: TrainSettings) -> AveragedModel | None:
    """Return the EMA model, or None if TRAIN_EMA_DECAY is 0."""
    if not settings.ema_decay:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.ema_decay))  # type: ignore[no-untyped-call]
