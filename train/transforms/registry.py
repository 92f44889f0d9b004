"""The named sets of transforms: what is drawn for a global batch, and what becomes of a rank's share of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from train.settings import ImageShape, TrainSettings
from train.transforms import book, flip_crop


@dataclass(frozen=True)
class Transform:
    """One set, for pictures as (N, H, W, C) bytes or floats.

    `draw(count, height, random)` returns a row of figures for each picture, `apply(images, rows, drawn)` the pictures
    of these rows, `judged(images)` what evaluation sees. `side` is the height and width that come out, None the same.
    `moves` says that pixels are only moved, so that any number of pictures at once come out the same to the bit.
    """

    draw: Callable[[int, int, torch.Generator], Tensor] | None
    apply: Callable[[Tensor, Tensor, Tensor], Tensor]
    eval_model: Callable[[Tensor], Tensor]
    side: int | None = None
    moves: bool = True

    def shape(self, shape: ImageShape) -> ImageShape:
        """Return (channels, height, width) of what comes out."""
        return (shape[0], self.side, self.side) if self.side else shape


def identity(images: Tensor) -> Tensor:
    """Return the pictures unchanged."""
    return images


TRANSFORMS: Mapping[str, Transform] = {
    "none": Transform(None, lambda images, rows, _: images.index_select(0, rows), identity),
    "flip-crop": Transform(flip_crop.draw, flip_crop.apply, identity),
    "book": Transform(book.sample_params, book.apply, book.eval_transform, book.CROP, moves=False),
}


def select_transform(settings: TrainSettings, channels: int) -> Transform:
    """Return the set asked for; on auto color pictures are flipped and shifted, since digits would suffer."""
    if settings.transforms != "auto":
        return TRANSFORMS[settings.transforms]
    return TRANSFORMS["flip-crop" if channels == 3 and settings.dataset != "synthetic" else "none"]
