"""One blank image through a model, to see what it takes, does, or counts."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from train.settings import ImageShape


def dry_run(model: nn.Module, shape: tuple[int, int, int], device: torch.device | None = None) -> None:
    """Run one blank (C, H, W) image through the model in evaluation, and leave it as it was; raises what it raises."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)


def count_multiply_adds(model: nn.Module, shape: ImageShape, device: torch.device) -> int:
    """Return the multiply-adds of one image's forward pass in products and convolutions, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        dry_run(model, shape, device)
    return int(counter.get_total_flops()) // 2


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
