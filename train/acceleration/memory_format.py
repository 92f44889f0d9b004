"""Memory format of images and filters: channels_last on request."""

from __future__ import annotations

import torch
from torch import nn


def memory_format(*, channels_last: bool) -> torch.memory_format:
    """Return the memory format of the images."""
    return torch.channels_last if channels_last else torch.contiguous_format


def set_memory_format(model: nn.Module, *, channels_last: bool) -> nn.Module:
    """Return the model with its filters in the memory format of the images."""
    return model.to(memory_format=memory_format(channels_last=channels_last))  # type: ignore[call-overload, no-any-return]
