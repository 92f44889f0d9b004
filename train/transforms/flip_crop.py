"""Random flips and small shifts of a whole batch at once: one gather, no Python per image."""

from __future__ import annotations

import torch
from torch import Tensor

# Pixels that an image of 32 is shifted by at most; other sizes in proportion.
MAX_SHIFT_AT_32PX = 2


def max_shift(height: int) -> int:
    """Return the pixels that images of a height are shifted by at most."""
    return max(1, MAX_SHIFT_AT_32PX * height // 32)


def sample_params(count: int, height: int, random: torch.Generator) -> Tensor:
    """Return (count, 3) int64 on the CPU: rows and columns to shift by, and 1 where the image is flipped."""
    most = max_shift(height)
    shifts = torch.randint(-most, most + 1, (count, 2), generator=random)
    flips = torch.randint(0, 2, (count, 1), generator=random)
    return torch.cat((shifts, flips), dim=1)


def apply(images: Tensor, rows: Tensor, drawn: Tensor) -> Tensor:
    """Return the images `rows` of (N, H, W, C) images, shifted and flipped; edges are mirrored.

    A crop from a mirrored border and a flip are both only another order of pixels, so that one gather does both.
    """
    _, height, width, channels = images.shape
    down, across, flipped = drawn.to(images.device).unbind(1)
    most = max_shift(height)
    lines = shift_table(height, most, images.device).index_select(0, down + most)
    ways = shift_table(width, most, images.device)
    columns = torch.cat((ways, ways.flip(1))).index_select(0, across + most + flipped * len(ways))
    pixels = ((rows[:, None] * height + lines) * width)[:, :, None] + columns[:, None, :]
    return images.view(-1, channels).index_select(0, pixels.view(-1)).view(len(rows), height, width, channels)


def shift_table(size: int, most: int, device: torch.device) -> Tensor:
    """Return (2 * most + 1, size): for each shift from -most on, where the pixels of a line come from."""
    shifts = torch.arange(-most, most + 1, device=device)
    return reflect_index(torch.arange(size, device=device) + shifts[:, None], size)


def reflect_index(index: Tensor, size: int) -> Tensor:
    """Return indices that ran over an edge of range(size) by less than its length, mirrored back inside."""
    index = index.abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index).clamp(min=0)
