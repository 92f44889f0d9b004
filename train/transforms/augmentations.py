"""The augmentations of images besides the transforms, a row each: what it draws for an image, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from train.settings import TrainSettings
from train.transforms import augment, erasing

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


POLICY = "augment_draws"
# The names are parts of the seeds.
AUGMENTATIONS: Mapping[str, Augmentation] = {
    POLICY: Augmentation(
        count_draws=lambda settings: augment.count_draws(settings.augment),
        apply=lambda settings, images, draws: augment.augment_batch(settings.augment, images, draws),
        on_bytes=True,
    ),
    "erase_draws": Augmentation(
        count_draws=lambda settings: erasing.DRAWS if settings.erasing else 0,
        apply=lambda settings, images, draws: erasing.erase(images, draws, settings.erasing),
        on_bytes=False,
    ),
}


def apply_augmentations(settings: TrainSettings, images: Tensor, draws: Draws, *, on_bytes: bool) -> Tensor:
    """Return the images with all augmentations that were sampled for them, of bytes or of floats."""
    for name, rows in draws.items():
        if AUGMENTATIONS[name].on_bytes == on_bytes:
            images = AUGMENTATIONS[name].apply(settings, images, rows)
    return images
