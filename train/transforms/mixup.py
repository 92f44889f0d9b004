"""Mixup and CutMix over the global batch: who is mixed with whom does not depend on the number of ranks."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass

import torch
from torch import Tensor

from train.settings import TrainSettings


@dataclass(frozen=True)
class MixParams:
    """How the images of one global batch are mixed: the number of each one's partner, and the share that stays own.

    With a `box` (top, bottom, left, right) the partner's pixels stand in it (CutMix, arXiv:1905.04899); without, the
    two lie over each other (mixup, arXiv:1710.09412).
    """

    partners: Tensor
    own: float
    box: tuple[int, int, int, int] | None = None

    def of(self, images: Tensor, others: Tensor) -> Tensor:
        """Return (N, C, H, W) images mixed with as many others."""
        if self.box is None:
            return images.lerp(others, 1 - self.own)
        top, bottom, left, right = self.box
        mixed = images.clone(memory_format=torch.preserve_format)
        mixed[:, :, top:bottom, left:right] = others[:, :, top:bottom, left:right]
        return mixed


def sample_mix(count: int, height: int, width: int, settings: TrainSettings, random: torch.Generator) -> MixParams:
    """Return how a batch of so many images is mixed; where both ways are on, each has every second batch's chance.

    The share is drawn from Beta(alpha, alpha), once a batch, as both papers do.
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
