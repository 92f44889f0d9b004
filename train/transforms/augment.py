"""TrivialAugment, RandAugment and AugMix: torchvision's operations, with draws that are made for the global batch.

torchvision draws from torch's global generator, which threads share. Here each image has a row of uniform numbers, the
same on any number of ranks and threads. Sources: arXiv:2103.10158, arXiv:1909.13719, arXiv:1912.02781.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from math import log
from typing import Any

import torch
from torch import Tensor

from train.transforms.image_part import Pixels

RAND = re.compile(r"rand-(\d{1,2})-(\d)")
# Steps of a magnitude in torchvision's TrivialAugmentWide and RandAugment, and in its AugMix.
BINS, MIX_BINS = 31, 10
# AugMix: chains, operations of a chain at most, and the largest step of a magnitude.
CHAINS, DEPTH, SEVERITY = 3, 3, 3
# Which operation, its magnitude and its sign.
OPERATION_DRAWS = 3
# Weights of the chains and of the mix; then the depth and the operations of each chain.
MIX_DRAWS = CHAINS + 1 + CHAINS * (1 + DEPTH * OPERATION_DRAWS)


def count_draws(policy: str) -> int:
    """Return how many uniform numbers an image needs; 0 for `none`."""
    if found := RAND.fullmatch(policy):
        return OPERATION_DRAWS * int(found[2])
    return {"trivial": OPERATION_DRAWS, "augmix": MIX_DRAWS}.get(policy, 0)


@cache
def torchvision_policy(policy: str) -> Any:
    """Return torchvision's object of a policy. It holds the operations and their magnitudes, and draws nothing here."""
    from torchvision.transforms import v2

    if found := RAND.fullmatch(policy):
        return v2.RandAugment(int(found[2]), int(found[1]))
    return v2.TrivialAugmentWide() if policy == "trivial" else v2.AugMix()


def choose_operation(policy: str, draws: Sequence[float], height: int, width: int) -> tuple[str, float]:
    """Return the operation that three draws select for an image of this size: torchvision's name, and its magnitude."""
    space = torchvision_policy(policy)._AUGMENTATION_SPACE  # noqa: SLF001  # the operations are nowhere public
    names = list(space)
    name = names[int(draws[0] * len(names))]
    magnitudes_of, is_signed = space[name]
    magnitudes = magnitudes_of(MIX_BINS if policy == "augmix" else BINS, height, width)
    if magnitudes is None:
        return name, 0.0
    if found := RAND.fullmatch(policy):
        step = int(found[1])
    else:
        step = int(draws[1] * (SEVERITY if policy == "augmix" else BINS))
    magnitude = float(magnitudes[step])
    return name, -magnitude if is_signed and draws[2] <= 0.5 else magnitude


def apply_operations(policy: str, image: Tensor, draws: Sequence[float]) -> Tensor:
    """Return a (C, H, W) uint8 image after the operations that the draws select."""
    owner = torchvision_policy(policy)
    height, width = image.shape[1:]
    for start in range(0, len(draws), OPERATION_DRAWS):
        name, magnitude = choose_operation(policy, draws[start : start + OPERATION_DRAWS], height, width)
        image = owner._apply_image_or_video_transform(  # noqa: SLF001  # operations by name are nowhere public
            image,
            name,
            magnitude,
            owner.interpolation,
            owner._fill,  # noqa: SLF001
        )
    return image


def augment(policy: str, image: Tensor, draws: Sequence[float]) -> Tensor:
    """Return a (C, H, W) uint8 image, augmented by the policy; `draws` are its uniform numbers."""
    return augmix(image, draws) if policy == "augmix" else apply_operations(policy, image, draws)


def augmix(image: Tensor, draws: Sequence[float]) -> Tensor:
    """Return the mix of an image and three chains of operations on it.

    With AugMix's alpha of 1, the share of the image is uniform, and the chains' weights are as of exponential numbers.
    """
    exponentials = [-log(1 - one) for one in draws[:CHAINS]]
    share = draws[CHAINS]
    mixed = share * image.float()
    for chain in range(CHAINS):
        start = CHAINS + 1 + chain * (1 + DEPTH * OPERATION_DRAWS)
        depth = 1 + int(draws[start] * DEPTH)
        chained = apply_operations("augmix", image, draws[start + 1 : start + 1 + depth * OPERATION_DRAWS])
        mixed += (1 - share) * exponentials[chain] / sum(exponentials) * chained.float()
    return mixed.clamp(0, 255).to(torch.uint8)


def augment_pixels(policy: str, pixels: Pixels, draws: Sequence[float]) -> None:
    """Augment (height, width, channels) bytes in place."""
    image = torch.from_numpy(pixels)
    image.copy_(augment(policy, image.permute(2, 0, 1), draws).permute(1, 2, 0))


def augment_batch(policy: str, images: Tensor, draws: Tensor) -> Tensor:
    """Return (N, H, W, C) images as bytes, each augmented by its row of draws."""
    images = images if images.dtype == torch.uint8 else images.round().clamp(0, 255).to(torch.uint8)
    rows = draws.tolist()
    changed = [augment(policy, image.permute(2, 0, 1), row) for image, row in zip(images, rows, strict=True)]
    return torch.stack(changed).permute(0, 2, 3, 1).contiguous()
