"""The book's transforms for a whole batch: resize 255, crop 224, flip, rotate by 20°, blur 3, tensor, normalize.

Each image has its own random parameters, as with torchvision's transforms; a test compares the results.
The last two of the seven tasks are done for every data source, outside this module.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import grid_sample, pad

from train.settings import BOOK_PIXELS
from train.transforms.normalize import copy_to_device

CROP = 224
DEGREES = 20.0
SIGMA = (0.1, 2.0)


def sample_params(count: int, _: int, random: torch.Generator) -> Tensor:
    """Return (count, 3) floats on the CPU: 1 to flip, the rotation in degrees, and the blur's standard deviation."""
    flips = torch.randint(0, 2, (count, 1), generator=random).float()
    uniform = torch.rand(count, 2, generator=random)
    low, high = torch.tensor([-DEGREES, SIGMA[0]]), torch.tensor([DEGREES, SIGMA[1]])
    return torch.cat((flips, low + uniform * (high - low)), dim=1)


def apply(images: Tensor, rows: Tensor, params: Tensor) -> Tensor:
    """Return the images `rows` of (N, H, W, C) images, transformed, as (n, 224, 224, C) floats from 0 to 255."""
    params = copy_to_device(params, images.device)
    images = resize_crop(images.index_select(0, rows))
    images = torch.where(params[:, :1, None, None] == 1, images.flip(3), images)
    return blur(rotate(images, params[:, 1]), params[:, 2]).permute(0, 2, 3, 1)


def eval_transform(images: Tensor) -> Tensor:
    """Return (N, H, W, C) images for evaluation: resized and center-cropped, nothing random."""
    return resize_crop(images).permute(0, 2, 3, 1)


def resize_crop(images: Tensor) -> Tensor:
    """Return (N, H, W, C) images as (N, C, 224, 224) floats: shorter side resized to 255, then center-cropped."""
    from torchvision.transforms.v2 import functional  # the import is slow

    images = functional.resize(images.permute(0, 3, 1, 2).float(), [BOOK_PIXELS], antialias=True)
    cropped: Tensor = functional.center_crop(images, [CROP, CROP])
    return cropped


def rotate(images: Tensor, degrees: Tensor) -> Tensor:
    """Return (N, C, H, W) images, each rotated counterclockwise about its center by its own degrees."""
    count, _, height, width = images.shape
    across = torch.arange(width, device=images.device) - (width - 1) / 2
    down = torch.arange(height, device=images.device) - (height - 1) / 2
    angle = degrees.deg2rad().view(count, 1, 1)
    cosine, sine = angle.cos(), angle.sin()
    x = (cosine * across - sine * down[:, None]) * (2 / width)
    y = (sine * across + cosine * down[:, None]) * (2 / height)
    grid = torch.stack((x, y), dim=3)
    return grid_sample(images, grid, mode="nearest", padding_mode="zeros", align_corners=False)


def blur(images: Tensor, sigma: Tensor) -> Tensor:
    """Return (N, C, H, W) images after a 3x3 Gaussian blur with a standard deviation per image and reflected edges."""
    neighbor_weight = torch.exp(-0.5 / sigma.square()).view(-1, 1, 1, 1)
    total = 1 + 2 * neighbor_weight
    wide = pad(images, (1, 1, 1, 1), mode="reflect")
    wide = (wide[..., 1:-1] + neighbor_weight * (wide[..., :-2] + wide[..., 2:])) / total
    return (wide[:, :, 1:-1] + neighbor_weight * (wide[:, :, :-2] + wide[:, :, 2:])) / total
