"""Transforms by name: parameters sampled for a global batch, and applied to a rank's shard of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from train.setting_groups.data import DataSettings
from train.settings import ImageShape
from train.transforms import book, flip_crop, imagenet
from train.transforms.augment import flip_chance
from train.transforms.image_part import PLAIN_VIEW, Crop, Size, View


@dataclass(frozen=True)
class Transform:
    """One named transform of (N, H, W, C) images, as bytes or floats.

    `sample_params(count, height, random)` returns a row of parameters per image.
    `apply(images, rows, params)` returns the transformed images of these rows.
    `eval_transform(images)` returns the images for evaluation.
    `side` is the height and width of the result, None if the size is unchanged.
    `is_permutation` means that pixels are only moved. Then results do not depend on how many images are transformed at
    once.
    `train_views(params, size)` returns for each image what a decoder does instead of `apply`, if it can.
    `eval_crop(size)` is the crop of evaluation; without it an image is the largest part in the middle.
    """

    sample_params: Callable[[int, int, torch.Generator], Tensor] | None
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]
    eval_transform: Callable[[Tensor], Tensor]
    side: int | None = None
    is_permutation: bool = True
    train_views: Callable[[Tensor, Size], Sequence[View]] | None = None
    eval_crop: Callable[[Size], Crop] | None = None

    def shape(self, shape: ImageShape) -> ImageShape:
        """Return (channels, height, width) of a transformed image."""
        return (shape[0], self.side, self.side) if self.side else shape

    def eval_view(self, shape: ImageShape) -> View:
        """Return which part of an image file of this decoded shape is evaluated."""
        return View(self.eval_crop((shape[2], shape[1]))) if self.eval_crop else PLAIN_VIEW

    def after_decoding(self, images: Tensor) -> Tensor:
        """Return decoded images for evaluation; a decoder has already cut out what `eval_crop` says."""
        return images if self.eval_crop else self.eval_transform(images)


def identity(images: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


def select(images: Tensor, rows: Tensor, _: Tensor) -> Tensor:
    """Return the images `rows` unchanged."""
    return images.index_select(0, rows)


TRANSFORMS: Mapping[str, Transform] = {
    "none": Transform(None, select, identity),
    "book": Transform(book.sample_params, book.apply, book.eval_transform, book.CROP, is_permutation=False),
}


def select_transform(settings: DataSettings, channels: int) -> Transform:
    """Return the configured transform."""
    name, flips = settings.transform_of(channels), flip_chance(settings.augment)
    if name == "imagenet":
        smallest, share = settings.crop_scale, settings.crop_ratio
        return Transform(
            imagenet.sample_params,
            partial(imagenet.apply, smallest=smallest, flips=flips),
            partial(imagenet.eval_transform, share=share),
            is_permutation=False,
            train_views=partial(imagenet.train_views, smallest=smallest, flips=flips),
            eval_crop=partial(imagenet.eval_crop, share=share),
        )
    if name == "flip-crop":
        sample_params = partial(flip_crop.sample_params, flips=flips)
        return Transform(sample_params, flip_crop.apply, identity, train_views=flip_crop.train_views)
    return TRANSFORMS[name]
