"""The augmentations of images besides the transforms, a row each: what it draws for an image, and what it does.

Mixup and CutMix mix over the global batch, so that the mix does not depend on the number of ranks.
"""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import torch
from torch import Tensor

from train.setting_groups.data import DataSettings
from train.settings import TrainSettings
from train.transforms import augment

# By the name of an augmentation, a row of uniform numbers for each image.
Draws = Mapping[str, Tensor]


@dataclass(frozen=True)
class Augmentation:
    """One augmentation, of (N, H, W, C) bytes (`on_bytes`) or of normalized (N, C, H, W) floats.

    `count_draws(settings)` returns how many uniform numbers an image needs, 0 where it is off, and
    `apply(settings, images, draws)` the augmented images.
    """

    count_draws: Callable[[TrainSettings], int]
    apply: Callable[[TrainSettings, Tensor, Tensor], Tensor]
    on_bytes: bool


# Random erasing (arXiv:1708.04896): a box of each image is set to the mean, with torchvision's distributions.
AREA = (0.02, 0.33)
RATIO = (0.3, 3.3)
TRIES = 10
# Whether to erase; for each try an area and a ratio; then the place down and across.
ERASING_DRAWS = 1 + 2 * TRIES + 2


def erased_box(draws: Sequence[float], probability: float, height: int, width: int) -> tuple[int, int, int, int] | None:
    """Return (top, bottom, left, right) of the box to erase, None where nothing is erased."""
    if draws[0] >= probability:
        return None
    for area, ratio in zip(draws[1 : 1 + 2 * TRIES : 2], draws[2 : 2 + 2 * TRIES : 2], strict=True):
        pixels = height * width * (AREA[0] + area * (AREA[1] - AREA[0]))
        aspect = exp(log(RATIO[0]) + ratio * (log(RATIO[1]) - log(RATIO[0])))
        down, across = round(sqrt(pixels * aspect)), round(sqrt(pixels / aspect))
        if down < height and across < width:
            top = int(draws[-2] * (height - down + 1))
            left = int(draws[-1] * (width - across + 1))
            return top, top + down, left, left + across
    return None


def erase(images: Tensor, draws: Tensor, probability: float) -> Tensor:
    """Set a box of each normalized (N, C, H, W) image to 0, which is the mean, in place; return the images."""
    height, width = images.shape[2:]
    for image, row in zip(images, draws.tolist(), strict=True):
        if box := erased_box(row, probability, height, width):
            top, bottom, left, right = box
            image[:, top:bottom, left:right] = 0
    return images


POLICY = "augment_draws"
# The names are parts of the seeds.
AUGMENTATIONS: Mapping[str, Augmentation] = {
    POLICY: Augmentation(
        count_draws=lambda settings: augment.count_draws(settings.data.augment),
        apply=lambda settings, images, draws: augment.augment_batch(settings.data.augment, images, draws),
        on_bytes=True,
    ),
    "erase_draws": Augmentation(
        count_draws=lambda settings: ERASING_DRAWS if settings.data.erasing else 0,
        apply=lambda settings, images, draws: erase(images, draws, settings.data.erasing),
        on_bytes=False,
    ),
}


def apply_augmentations(settings: TrainSettings, images: Tensor, draws: Draws, *, on_bytes: bool) -> Tensor:
    """Return the images with all augmentations that were sampled for them, of bytes or of floats."""
    for name, rows in draws.items():
        if AUGMENTATIONS[name].on_bytes == on_bytes:
            images = AUGMENTATIONS[name].apply(settings, images, rows)
    return images


@dataclass(frozen=True)
class MixParams:
    """How one global batch is mixed: each image's partner, and the weight of the image itself.

    With `cut_box` (top, bottom, left, right), CutMix copies this region from the partner (arXiv:1905.04899).
    Without it, mixup interpolates the two images (arXiv:1710.09412).
    """

    partner_indices: Tensor
    own_weight: float
    cut_box: tuple[int, int, int, int] | None = None

    def apply(self, images: Tensor, others: Tensor) -> Tensor:
        """Return (N, C, H, W) images mixed with the same number of partner images."""
        if self.cut_box is None:
            return images.lerp(others, 1 - self.own_weight)
        top, bottom, left, right = self.cut_box
        mixed = images.clone(memory_format=torch.preserve_format)
        mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        return mixed


def sample_mix(count: int, height: int, width: int, settings: DataSettings, random: torch.Generator) -> MixParams:
    """Return the sampled mix of a batch of `count` images; if both methods are on, each has probability 0.5.

    The weight is sampled once per batch from Beta(alpha, alpha), as in both papers.
    """
    partners = torch.randperm(count, generator=random)
    chance = python_random.Random(int(torch.randint(2**62, (1,), generator=random)))
    cuts = bool(settings.cutmix_alpha) and (not settings.mixup_alpha or chance.random() < 0.5)
    alpha = settings.cutmix_alpha if cuts else settings.mixup_alpha
    own = chance.betavariate(alpha, alpha)
    if not cuts:
        return MixParams(partners, own)
    side = (1 - own) ** 0.5
    middle_y, middle_x = chance.randrange(height), chance.randrange(width)
    half_y, half_x = round(height * side / 2), round(width * side / 2)
    top, bottom = max(0, middle_y - half_y), min(height, middle_y + half_y)
    left, right = max(0, middle_x - half_x), min(width, middle_x + half_x)
    return MixParams(partners, 1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))
