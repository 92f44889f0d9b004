"""Optimizers and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from train.settings import TrainSettings

# Peak rates that trained the CNN well on CIFAR-10 and digits at the default batch size.
DEFAULT_LR = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001}
ONECYCLE_WARMUP = 0.25


def build_optimizer(settings: TrainSettings, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer; its learning rate is set before each step by `set_lr`."""
    lr = peak_lr(settings)
    common: dict[str, Any] = {"lr": lr, "weight_decay": settings.weight_decay, "fused": True}
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "sgd":
        nesterov = settings.momentum > 0
        return torch.optim.SGD(parameters, momentum=settings.momentum, nesterov=nesterov, **common)
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, **common)


def peak_lr(settings: TrainSettings) -> float:
    """Return the highest learning rate of the run."""
    return DEFAULT_LR[settings.optimizer] if settings.lr == "auto" else settings.lr


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every parameter group the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def lr_schedule(settings: TrainSettings, total_steps: int) -> Callable[[int], float]:
    """Return the learning rate as a function of the step, counted from 0.

    It depends on nothing else, so a resumed run goes on with the same rates. One-cycle rises and falls in
    straight lines (Smith, 2018, arXiv:1803.09820), cosine falls as in SGDR (arXiv:1608.03983).
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


def with_ipex(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return both as Intel's extension optimises them for training; weights keep their layout and stay fp32.

    Packed weights and a fused update would save little more, and change what a checkpoint holds.
    """
    import intel_extension_for_pytorch as ipex

    options = {"weights_prepack": False, "fuse_update_step": False}
    optimised: tuple[nn.Module, torch.optim.Optimizer] = ipex.optimize(
        model.train(), optimizer=optimizer, dtype=torch.float32, **options
    )
    return optimised
