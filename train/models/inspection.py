"""One blank image through a model, to see what it takes, does, or counts."""

from __future__ import annotations

import torch
from torch import nn


def see_blank(model: nn.Module, shape: tuple[int, int, int], device: torch.device | None = None) -> None:
    """Run one blank (C, H, W) image through the model in evaluation, and leave it as it was; raises what it raises."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)
