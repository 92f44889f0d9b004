"""Mixup and CutMix over the global batch, so that the mix does not depend on the number of ranks."""

from __future__ import annotations

import random as python_random
from dataclasses import dataclass

import torch
from torch import Tensor

from train.settings import TrainSettings


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


def sample_mix(count: int, height: int, width: int, settings: TrainSettings, random: torch.Generator) -> MixParams:
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
