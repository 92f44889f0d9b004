"""Batches cut from images in memory: no Python per image, no worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from train import flip_crop
from train.batches import Batch, Normalise, Part, eval_slices, sequence
from train.datasets import Images
from train.group import Group
from train.pictures import Shape
from train.settings import TrainSettings

# Means and deviations of so many images are those of all to well under a grey level.
SAMPLE = 5000
EVAL_BATCH = 1024


class MemoryFeed:
    """The batches of one rank from images in memory, moved to the device first where they fit there."""

    def __init__(self, train: Images, test: Images, shape: Shape, settings: TrainSettings, group: Group) -> None:
        self.settings = settings
        self.group = group
        self.sequence = sequence(len(train), shape, settings, group)
        self.steps_per_epoch = self.sequence.steps_per_epoch
        self.normalise = measure(train.images, group.device)
        self.train = to_device(train, group.device)
        self.test = test

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield this rank's share of every full batch of the epoch, from one on."""
        for parts in self.sequence.epoch(epoch, first):
            yield Batch(tuple(self.gather(part) for part in parts), self.settings.batch_size)

    def gather(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return one part's images and labels on the device."""
        rows = part.rows.to(self.train.images.device)
        if part.shifts is None:
            images = self.train.images.index_select(0, rows)
        else:
            images = flip_crop.apply(self.train.images, rows, part.shifts)
        return self.normalise(images), self.train.labels.index_select(0, rows).to(self.group.device)

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's contiguous share of the test images."""
        for rows in eval_slices(len(self.test), EVAL_BATCH, self.settings, self.group):
            yield self.normalise(self.test.images[rows]), self.test.labels[rows].to(self.group.device)


def measure(images: Tensor, device: torch.device) -> Normalise:
    """Return the normalisation by the means and deviations of the training images' channels."""
    sample = images[:: max(1, len(images) // SAMPLE)].float().flatten(0, 2)
    return Normalise.of(sample.mean(0), sample.std(0), device)


def to_device(split: Images, device: torch.device) -> Images:
    """Return the split on a GPU where it takes at most a quarter of its memory, else where it is."""
    if device.type != "cuda" or split.images.nbytes > torch.cuda.get_device_properties(device).total_memory // 4:
        return split
    return Images(split.images.to(device), split.labels.to(device))
