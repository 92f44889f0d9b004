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
from torch.nn.functional import grid_sample

from train.transforms.image_part import Box, Crop, Size, View, fit_crop
from train.transforms.normalize import copy_to_device

RATIO = (3 / 4, 4 / 3)
TRIES = 10
# For each try an area and a ratio, then the place across and down, then whether to flip.
DRAWS = 2 * TRIES + 3


def sample_params(count: int, _: int, random: torch.Generator) -> Tensor:
    """Return (count, DRAWS) floats on the CPU, each uniform in [0, 1)."""
    return torch.rand(count, DRAWS, generator=random)


def train_views(params: Tensor, output: Size, smallest: float, flips: float) -> list[View]:
    """Return a random crop of at least the area `smallest` for each image, flipped by a chance."""
    mirrored = np.arange(output[0] - 1, -1, -1, dtype=np.intc)
    return [
        View(partial(random_crop, draws, smallest), None, mirrored if draws[-1] < flips else None)
        for draws in params.tolist()
    ]


def random_crop(draws: Sequence[float], smallest: float, size: Size) -> Box:
    """Return the box that the draws select in an image of this size.

    If no try fits into the image, it is the largest box in the middle with an allowed ratio.
    """
    width, height = size
    for area, ratio in zip(draws[0 : 2 * TRIES : 2], draws[1 : 2 * TRIES : 2], strict=True):
        pixels = width * height * (smallest + area * (1 - smallest))
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


def apply(images: Tensor, rows: Tensor, params: Tensor, smallest: float, flips: float) -> Tensor:
    """Return the images `rows` of (N, H, W, C) images in memory: a random crop of each, resized to H and W, as floats.

    Crops are smaller than the image, so they are only enlarged: bilinear, as torchvision's resized crop.
    """
    _, height, width, _ = images.shape
    draws = params.tolist()
    boxes = torch.tensor([random_crop(one, smallest, (width, height)) for one in draws], device=images.device)
    flipped = torch.tensor([one[-1] < flips for one in draws], device=images.device)
    return resize_boxes(images.index_select(0, rows), boxes, flipped)


def eval_transform(images: Tensor, share: float) -> Tensor:
    """Return (N, H, W, C) images in memory as evaluation sees them: the middle, enlarged."""
    if share == 1:
        return images
    _, height, width, _ = images.shape
    box = torch.tensor(eval_crop((width, height), share)((width, height)), device=images.device)
    return resize_boxes(images, box.expand(len(images), 4), torch.zeros(len(images), dtype=torch.bool))


def resize_boxes(images: Tensor, boxes: Tensor, flipped: Tensor) -> Tensor:
    """Return a box (left, top, right, bottom) of each image, enlarged to the image's size and flipped, as floats."""
    height, width = images.shape[1:3]
    across = sampling_places(boxes[:, 0], boxes[:, 2], width)
    down = sampling_places(boxes[:, 1], boxes[:, 3], height)
    across = torch.where(copy_to_device(flipped, images.device)[:, None], across.flip(1), across)
    grid = torch.stack((across[:, None].expand(-1, height, -1), down[:, :, None].expand(-1, -1, width)), dim=3)
    return grid_sample(images.permute(0, 3, 1, 2).float(), grid, align_corners=False).permute(0, 2, 3, 1)


def sampling_places(low: Tensor, high: Tensor, size: int) -> Tensor:
    """Return for each of `size` outputs where it lies between `low` and `high`: -1 and 1 are the image's edges."""
    steps = (torch.arange(size, device=low.device) + 0.5) / size
    places = low[:, None] + steps * (high - low)[:, None]
    inside = places.maximum(low.floor()[:, None] + 0.5).minimum(high.ceil()[:, None] - 0.5)
    return inside * (2 / size) - 1


def eval_crop(output: Size, share: float) -> Crop:
    """Return the crop for evaluation: a share of the largest box in the middle with the aspect of the output."""
    whole = fit_crop(output)

    def crop(size: Size) -> Box:
        left, top, right, bottom = whole(size)
        across, down = (right - left) * (1 - share) / 2, (bottom - top) * (1 - share) / 2
        return left + across, top + down, right - across, bottom - down

    return crop
