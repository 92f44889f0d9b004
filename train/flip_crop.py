"""Random flips and small shifts of a whole batch at once: one gather, no Python per image."""

from __future__ import annotations

import torch
from torch import Tensor

# Pixels that a picture of 32 is shifted by at most; other sizes in proportion.
SHIFT_OF_32 = 2


def draw(count: int, height: int, random: torch.Generator) -> Tensor:
    """Return (count, 3) int64 on the CPU: rows and columns to shift by, and 1 where the picture is flipped."""
    most = max(1, SHIFT_OF_32 * height // 32)
    shifts = torch.randint(-most, most + 1, (count, 2), generator=random)
    flips = torch.randint(0, 2, (count, 1), generator=random)
    return torch.cat((shifts, flips), dim=1)


def apply(images: Tensor, rows: Tensor, drawn: Tensor) -> Tensor:
    """Return the pictures `rows` of (N, H, W, C) images, shifted and flipped; edges are mirrored.

    A crop from a mirrored border and a flip are both only another order of pixels, so that one gather does both.
    """
    _, height, width, channels = images.shape
    drawn = drawn.to(images.device)
    lines = mirrored(torch.arange(height, device=images.device) + drawn[:, :1], height)
    across = torch.arange(width, device=images.device)
    columns = mirrored(torch.where(drawn[:, 2:] == 1, across.flip(0), across) + drawn[:, 1:2], width)
    pixels = (rows[:, None, None] * height + lines[:, :, None]) * width + columns[:, None, :]
    return images.view(-1, channels).index_select(0, pixels.view(-1)).view(len(rows), height, width, channels)


def mirrored(index: Tensor, size: int) -> Tensor:
    """Return indices that ran over an edge of range(size) by less than its length, mirrored back inside."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index).clamp(min=0)
