"""Runs one blank image through a model, to test its input size or to count its operations."""

from __future__ import annotations

import torch
from torch import nn

from entrypoint.core.errors import first_line
from train.settings import ImageShape


def dry_run(model: nn.Module, shape: tuple[int, int, int], device: torch.device | None = None) -> object:
    """Return what the model makes of one blank (C, H, W) image in evaluation mode, then restore its mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)


def count_multiply_adds(model: nn.Module, shape: ImageShape, device: torch.device) -> int:
    """Return the multiply-adds of products and convolutions in one image's forward pass, as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton (torch 2.15)

    with FlopCounterMode(display=False) as counter:
        dry_run(model, shape, device)
    return int(counter.get_total_flops()) // 2


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def single_image_problem(model: nn.Module, shape: ImageShape) -> str:
    """Return why a model cannot be trained on one image at a time, empty if it can.

    BatchNorm raises ValueError if a channel has a single value in training mode.
    """
    model.train()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape))
    except ValueError as error:
        return first_line(error)
    return ""
