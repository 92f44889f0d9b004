"""ImageNet's usual transforms: random resized crop and flip to train, the middle of the image to evaluate.

The crop is known before an image is decoded, so only what it needs is decoded. The distributions are torchvision's
(`RandomResizedCrop`, and `Resize` to 256 with `CenterCrop` to 224).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import exp, log, sqrt

import numpy as np
import torch
from torch import Tensor

from train.transforms.image_part import Box, Crop, Size, View, fit_crop

AREA = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
# The share of the shorter side that evaluation sees.
EVAL_SHARE = 224 / 256
# For each try an area and a ratio, then the place across and down, then whether to flip.
DRAWS = 2 * TRIES + 3
FLIP_SHARE = 0.5


def sample_params(count: int, _: int, random: torch.Generator) -> Tensor:
    """Return (count, DRAWS) floats on the CPU, each uniform in [0, 1)."""
    return torch.rand(count, DRAWS, generator=random)


def train_views(params: Tensor, output: Size) -> list[View]:
    """Return a random crop for each image, and whether it is flipped."""
    mirrored = np.arange(output[0] - 1, -1, -1, dtype=np.intc)
    return [
        View(partial(random_crop, draws), None, mirrored if draws[-1] < FLIP_SHARE else None)
        for draws in params.tolist()
    ]


def random_crop(draws: Sequence[float], size: Size) -> Box:
    """Return the box that the draws select in an image of this size.

    If no try fits into the image, it is the largest box in the middle with an allowed ratio.
    """
    width, height = size
    for area, ratio in zip(draws[0 : 2 * TRIES : 2], draws[1 : 2 * TRIES : 2], strict=True):
        pixels = width * height * (AREA[0] + area * (AREA[1] - AREA[0]))
        aspect = exp(log(RATIO[0]) + ratio * (log(RATIO[1]) - log(RATIO[0])))
        across, down = round(sqrt(pixels * aspect)), round(sqrt(pixels / aspect))
        if 0 < across <= width and 0 < down <= height:
            left = int(draws[2 * TRIES] * (width - across + 1))
            top = int(draws[2 * TRIES + 1] * (height - down + 1))
            return left, top, left + across, top + down
    aspect = min(max(width / height, RATIO[0]), RATIO[1])
    across, down = min(width, round(height * aspect)), min(height, round(width / aspect))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def eval_crop(output: Size) -> Crop:
    """Return the crop for evaluation: 7/8 of the largest box in the middle with the aspect of the output."""
    whole = fit_crop(output)

    def crop(size: Size) -> Box:
        left, top, right, bottom = whole(size)
        across, down = (right - left) * (1 - EVAL_SHARE) / 2, (bottom - top) * (1 - EVAL_SHARE) / 2
        return left + across, top + down, right - across, bottom - down

    return crop
