"""Augmentation of single images: torchvision's operations, with draws that are made for the global batch.

torchvision draws from torch's global generator, which threads share. Here each image has a row of uniform numbers, the
same on any number of ranks and threads. Sources: TrivialAugment arXiv:2103.10158, RandAugment arXiv:1909.13719,
AutoAugment arXiv:1805.09501, 3-Augment arXiv:2204.07118.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from train.transforms.image_part import Pixels

# Steps of a magnitude in torchvision's TrivialAugmentWide and RandAugment, and in its AutoAugment.
BINS, AUTO_BINS = 31, 10
# The standard deviation of a blur (pixels), as in DeiT III and SimCLR; the kernel has two of them on each side.
SIGMA = (0.1, 2.0)
SOLARIZED_FROM = 128
ADJUSTMENTS = ("brightness", "contrast", "saturation")
HORIZONTAL_FLIP = "hflip"
# What a transform flips unless TRAIN_AUGMENT says another chance.
FLIP_CHANCE = 0.5


@cache
def torchvision_policy(name: str) -> Any:
    """Return torchvision's object of a policy. It holds the operations and their magnitudes, and draws nothing here."""
    from torchvision.transforms import v2

    return {"trivial": v2.TrivialAugmentWide, "rand": v2.RandAugment, "auto": v2.AutoAugment}[name]()


def apply_by_name(owner: Any, image: Tensor, name: str, step: int, sign: float) -> Tensor:
    """Return an image after torchvision's operation of this name, at a step of its magnitudes; `sign` is a draw."""
    magnitudes_of, is_signed = owner._AUGMENTATION_SPACE[name]  # noqa: SLF001  # the operations are nowhere public
    magnitudes = magnitudes_of(AUTO_BINS if owner is torchvision_policy("auto") else BINS, *image.shape[1:])
    magnitude = 0.0 if magnitudes is None else float(magnitudes[step])
    changed: Tensor = owner._apply_image_or_video_transform(  # noqa: SLF001
        image,
        name,
        -magnitude if is_signed and sign <= 0.5 else magnitude,
        owner.interpolation,
        owner._fill,  # noqa: SLF001
    )
    return changed


def choose_one(policy: str, image: Tensor, draws: Sequence[float], magnitude: float) -> Tensor:
    """Return an image after one of all operations: TrivialAugment draws its magnitude, RandAugment has it given."""
    owner = torchvision_policy(policy)
    names = list(owner._AUGMENTATION_SPACE)  # noqa: SLF001
    step = int(draws[1] * BINS) if policy == "trivial" else int(magnitude)
    return apply_by_name(owner, image, names[int(draws[0] * len(names))], step, draws[2])


def auto(image: Tensor, draws: Sequence[float], _: float) -> Tensor:
    """Return an image after one of AutoAugment's pairs of operations, which were searched for ImageNet."""
    owner = torchvision_policy("auto")
    pairs = owner._policies  # noqa: SLF001
    pair = pairs[int(draws[0] * len(pairs))]
    for (name, chance, step), turn, sign in zip(pair, draws[1:3], draws[3:], strict=True):
        if turn <= chance:
            image = apply_by_name(owner, image, name, step, sign)
    return image


def jitter(image: Tensor, draws: Sequence[float], most: float) -> Tensor:
    """Return an image with brightness, contrast and saturation changed by up to `most`, in a drawn order."""
    from torchvision.transforms.v2 import functional

    for index in sorted(range(3), key=draws[3:].__getitem__):
        adjust = getattr(functional, f"adjust_{ADJUSTMENTS[index]}")
        image = adjust(image, 1 + most * (2 * draws[index] - 1))
    return image


def gray(image: Tensor, draws: Sequence[float], chance: float) -> Tensor:
    """Return a color image without its colors by a chance."""
    from torchvision.transforms.v2 import functional

    if draws[0] >= chance or len(image) == 1:
        return image
    changed: Tensor = functional.rgb_to_grayscale(image, num_output_channels=3)
    return changed


def blur(image: Tensor, draws: Sequence[float], chance: float) -> Tensor:
    """Return a blurred image by a chance."""
    from torchvision.transforms.v2 import functional

    if draws[0] >= chance:
        return image
    sigma = SIGMA[0] + draws[1] * (SIGMA[1] - SIGMA[0])
    side = min(2 * ceil(2 * sigma) + 1, 2 * min(image.shape[1:]) - 1)
    changed: Tensor = functional.gaussian_blur(image, [side, side], [sigma, sigma])
    return changed


def three(image: Tensor, draws: Sequence[float], _: float) -> Tensor:
    """Return an image that is gray, solarized or blurred, one of the three."""
    from torchvision.transforms.v2 import functional

    if draws[0] < 1 / 3:
        return gray(image, draws, 1)
    if draws[0] >= 2 / 3:
        return blur(image, draws, 1)
    changed: Tensor = functional.solarize(image, SOLARIZED_FROM)
    return changed


class Operation(NamedTuple):
    """How many uniform numbers an image needs, and what returns the changed (C, H, W) bytes.

    `apply(image, draws, amount)` gets the number behind the operation's name: a strength or a chance.
    """

    draws: int
    apply: Callable[[Tensor, Sequence[float], float], Tensor]


OPERATIONS: Mapping[str, Operation] = {
    "none": Operation(0, lambda image, *_: image),
    HORIZONTAL_FLIP: Operation(0, lambda image, *_: image),  # the transform flips
    "vflip": Operation(1, lambda image, draws, chance: image.flip(1) if draws[0] < chance else image),
    "trivial": Operation(3, partial(choose_one, "trivial")),
    "rand": Operation(3, partial(choose_one, "rand")),
    "auto": Operation(5, auto),
    "3augment": Operation(2, three),
    "jitter": Operation(6, jitter),
    "gray": Operation(1, gray),
    "blur": Operation(2, blur),
}


@cache
def operations_of(policy: str) -> tuple[tuple[str, float], ...]:
    """Return the operations that TRAIN_AUGMENT names, in order, each with its number; `rand-9-2` is `rand-9` twice."""
    listed: list[tuple[str, float]] = []
    for text in policy.split(","):
        name, _, numbers = text.partition("-")
        amount, _, times = numbers.partition("-")
        listed += [(name, float(amount or 0))] * int(times or 1)
    return tuple(listed)


def flip_chance(policy: str) -> float:
    """Return by which chance a transform flips an image horizontally."""
    return dict(operations_of(policy)).get(HORIZONTAL_FLIP, FLIP_CHANCE)


def count_draws(policy: str) -> int:
    """Return how many uniform numbers an image needs; 0 for `none`."""
    return sum(OPERATIONS[name].draws for name, _ in operations_of(policy))


def augment(policy: str, image: Tensor, draws: Sequence[float]) -> Tensor:
    """Return a (C, H, W) uint8 image, augmented by the policy; `draws` are its uniform numbers."""
    start = 0
    for name, amount in operations_of(policy):
        operation = OPERATIONS[name]
        image = operation.apply(image, draws[start : start + operation.draws], amount)
        start += operation.draws
    return image


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
