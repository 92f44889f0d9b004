"""Random flips and small shifts of a whole batch in one gather, without Python code per image."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from train.transforms.augment import FLIP_CHANCE
from train.transforms.image_part import Size, View
from train.transforms.normalize import copy_to_device

# The largest shift in pixels for images of 32x32. It scales with the image height.
MAX_SHIFT_AT_32PX = 2


def max_shift(height: int) -> int:
    """Return the largest shift in pixels for images of this height."""
    return max(1, MAX_SHIFT_AT_32PX * height // 32)


def sample_params(count: int, height: int, random: torch.Generator, flips: float = FLIP_CHANCE) -> Tensor:
    """Return (count, 3) int64 on the CPU: vertical shift, horizontal shift, and 1 to flip the image."""
    most = max_shift(height)
    shifts = torch.randint(-most, most + 1, (count, 2), generator=random)
    flipped = torch.rand(count, 1, generator=random) < flips
    return torch.cat((shifts, flipped.long()), dim=1)


def apply(images: Tensor, rows: Tensor, params: Tensor) -> Tensor:
    """Return the images `rows` of (N, H, W, C) images, shifted with reflected edges and flipped.

    A crop from a reflected border and a flip only permute pixels, so one gather does both.
    """
    _, height, width, channels = images.shape
    down, across, flipped = copy_to_device(params, images.device).unbind(1)
    most = max_shift(height)
    row_indices = shift_table(height, most, images.device).index_select(0, down + most)
    column_table = shift_table(width, most, images.device)
    columns = torch.cat((column_table, column_table.flip(1))).index_select(
        0, across + most + flipped * len(column_table)
    )
    pixels = ((rows[:, None] * height + row_indices) * width)[:, :, None] + columns[:, None, :]
    return images.view(-1, channels).index_select(0, pixels.view(-1)).view(len(rows), height, width, channels)


def train_views(params: Tensor, output: Size) -> list[View]:
    """Return for each image what `apply` does to it, for a decoder that writes an output of this size."""
    width, height = output
    most = max_shift(height)
    device = torch.device("cpu")
    rows = shift_table(height, most, device).numpy().astype(np.intc)
    columns = shift_table(width, most, device).numpy().astype(np.intc)
    mirrored = np.ascontiguousarray(columns[:, ::-1])
    return [
        View(None, rows[down + most], (mirrored if flipped else columns)[across + most])
        for down, across, flipped in params.tolist()
    ]


def shift_table(size: int, most: int, device: torch.device) -> Tensor:
    """Return (2 * most + 1, size) source indices along one axis, reflected, for each shift from -most to most."""
    shifts = torch.arange(-most, most + 1, device=device)
    index = (torch.arange(size, device=device) + shifts[:, None]).abs()
    return torch.where(index >= size, 2 * (size - 1) - index, index).clamp(min=0)
