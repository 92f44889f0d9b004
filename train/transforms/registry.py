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
    judged: Callable[[Tensor], Tensor]
    side: int | None = None
    moves: bool = True

    def shape(self, shape: ImageShape) -> ImageShape:
        """Return (channels, height, width) of what comes out."""
        return (shape[0], self.side, self.side) if self.side else shape


def as_they_are(images: Tensor) -> Tensor:
    """Return the pictures unchanged."""
    return images


SETS: Mapping[str, Transform] = {
    "none": Transform(None, lambda images, rows, _: images.index_select(0, rows), as_they_are),
    "flip-crop": Transform(flip_crop.draw, flip_crop.apply, as_they_are),
    "book": Transform(book.draw, book.apply, book.judged, book.SEEN, moves=False),
}


def transform_of(settings: TrainSettings, channels: int) -> Transform:
    """Return the set asked for; on auto colour pictures are flipped and shifted, since digits would suffer."""
    if settings.transforms != "auto":
        return SETS[settings.transforms]
    return SETS["flip-crop" if channels == 3 and settings.dataset != "synthetic" else "none"]
