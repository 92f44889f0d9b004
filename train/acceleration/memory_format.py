"""Memory format of images and filters: channels_last on request, except for filters of dense convolutions."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def memory_format(*, channels_last: bool) -> torch.memory_format:
    """Return the memory format of the images."""
    return torch.channels_last if channels_last else torch.contiguous_format


def set_memory_format(
    model: nn.Module, *, channels_last: bool, contiguous_weights: bool, ddp: bool = False
) -> nn.Module:
    """Return the model with its filters in the memory format of the images.

    With `contiguous_weights`, filters of dense convolutions stay contiguous.
    Why: oneDNN packs the filters at each step, and returns their gradients as contiguous tensors.
    For channels_last filters these gradients are copied twice: when they are accumulated, and by the optimizer.
    Depthwise filters do not stay contiguous, because that makes their convolutions slower.
    `ddp` means that DDP shares the gradients, whose strides must be exactly those of the filters.
    Filters that are contiguous in both formats get gradients with channels_last strides, so they are left alone.
    """
    model = model.to(memory_format=memory_format(channels_last=channels_last))  # type: ignore[call-overload]
    if channels_last and contiguous_weights:
        for module in model.modules():
            if (
                isinstance(module, nn.Conv2d)
                and module.groups == 1
                and not (ddp and has_ambiguous_format(module.weight))
            ):
                # contiguous() keeps the strides of a tensor that is contiguous in both formats.
                plain = torch.empty_like(module.weight, memory_format=torch.contiguous_format)
                module.weight.data = plain.copy_(module.weight.data)
    return model


def has_ambiguous_format(filters: Tensor) -> bool:
    """Return whether (out, in, height, width) filters are contiguous in both memory formats."""
    return filters.is_contiguous() and filters.is_contiguous(memory_format=torch.channels_last)
