"""What every feed gives the loop: this rank's share of each global batch, on the device, as floats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from train import flip_crop
from train.group import Group
from train.order import cut, epoch_order, generator
from train.pictures import Shape
from train.settings import TrainSettings

# A label that the loss and the evaluation leave out: a picture that could not be read.
LEFT_OUT = -1


@dataclass(frozen=True)
class Batch:
    """This rank's share of one global batch of `size` images, in one or more parts of (images, labels).

    Images are (N, C, H, W) float, normalised, in channels-last memory; labels are (N,) int64 or LEFT_OUT.
    """

    parts: tuple[tuple[Tensor, Tensor], ...]
    size: int


class Feed(Protocol):
    """A split's batches. Training ones depend on seed and epoch alone, whatever the number of ranks."""

    steps_per_epoch: int

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the epoch's batches from the one of number `first`; images that would fill only a part wait."""

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's share of the test images, each image on exactly one rank."""


@dataclass(frozen=True)
class Part:
    """Images that one rank computes at once: their rows in the split, and how each is shifted and flipped."""

    rows: Tensor
    shifts: Tensor | None


@dataclass(frozen=True)
class Sequence:
    """Which images make up which step, and which of them are this rank's.

    Order and augmentation are drawn for whole global batches, then cut: first among the ranks, then into the
    parts that gradients are accumulated over.
    """

    images: int
    height: int
    augment: bool
    settings: TrainSettings
    group: Group

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in the split."""
        return self.images // self.settings.batch_size

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[Part, ...]]:
        """Yield this rank's parts of each step, from the one of number `first` in the epoch."""
        size, seed = self.settings.batch_size, self.settings.seed
        order = epoch_order(self.images, seed, epoch)
        mine = cut(size, self.group.rank, self.group.world_size)
        for step in range(first, self.steps_per_epoch):
            rows = order[step * size : (step + 1) * size][mine]
            shifts: Tensor | None = None
            if self.augment:
                shifts = flip_crop.draw(size, self.height, generator(seed, "augment", epoch, step))[mine]
            pieces = (cut(len(rows), part, self.settings.accumulate) for part in range(self.settings.accumulate))
            yield tuple(Part(rows[piece], None if shifts is None else shifts[piece]) for piece in pieces)


def sequence(images: int, shape: Shape, settings: TrainSettings, group: Group) -> Sequence:
    """Return a training split's sequence; by default colour pictures are augmented, since digits would suffer."""
    augment = settings.augment == "flip-crop" or (
        settings.augment == "auto" and shape[0] == 3 and settings.dataset != "synthetic"
    )
    return Sequence(images, shape[1], augment, settings, group)


def eval_slices(count: int, default_size: int, settings: TrainSettings, group: Group) -> Iterator[slice]:
    """Yield this rank's contiguous share of range(count), an evaluation step at a time."""
    mine = cut(count, group.rank, group.world_size)
    size = default_size if settings.eval_batch_size == "auto" else settings.eval_batch_size
    for start in range(mine.start, mine.stop, size):
        yield slice(start, min(start + size, mine.stop))


@dataclass(frozen=True)
class Normalise:
    """Bytes to floats of mean 0 and deviation 1 a channel; `mean` and `scale` are (1, C, 1, 1)."""

    mean: Tensor
    scale: Tensor

    @staticmethod
    def of(mean: Tensor, deviation: Tensor, device: torch.device) -> Normalise:
        """Return the normalisation by (C,) means and deviations of bytes."""
        shape = (1, -1, 1, 1)
        return Normalise(mean.view(shape).to(device), (1 / deviation.clamp(min=1.0)).view(shape).to(device))

    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, H, W, C) bytes as (N, C, H, W) floats in channels-last memory, on this one's device."""
        floats = images.to(self.mean.device, non_blocking=True).permute(0, 3, 1, 2).float()
        return floats.sub_(self.mean).mul_(self.scale)
