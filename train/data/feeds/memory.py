"""Batches from images in memory: no Python code per image, no worker processes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from train.data.datasets import ImageTensors
from train.data.feeds.batches import (
    Batch,
    BatchSource,
    MicroBatchIndices,
    eval_batches,
    make_batch,
    sample_slice,
)
from train.data.val_split import ALL_ROWS, TRAIN, SplitRows
from train.distributed.process_group import ProcessGroup
from train.settings import TrainSettings
from train.transforms.augmentations import apply_augmentations
from train.transforms.normalize import Normalize, copy_to_device

# Sample size for means and standard deviations: enough for an error well below one gray level.
STATS_SAMPLE = 5000
# Bytes of images that are gathered at once, for several steps, by device. Why: after each step the caches of a CPU are
# full of weights, and on a GPU each step of a small model waits for the launches of its kernels.
GATHER_AHEAD_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
EVAL_BATCH_SIZE = 1024


class MemorySource(BatchSource):
    """The batches of one rank from images in memory, which are moved to the device if they fit there."""

    def __init__(
        self,
        train: ImageTensors,
        test: ImageTensors,
        settings: TrainSettings,
        group: ProcessGroup,
        normalize: Normalize | None = None,
        rows: SplitRows = ALL_ROWS,
    ) -> None:
        _, height, width, channels = train.images.shape
        super().__init__(train.labels, (channels, height, width), settings, group, rows)
        self.trained = torch.arange(len(train)) if rows.train is None else rows.train
        self.normalize = normalize or measure_normalization(
            train.images, self.trained, group.device, channels_last=settings.compute.channels_last
        )
        self.train = to_device(train, group.device)
        self.test = test
        share = max(1, settings.optim.batch_size // group.world_size) * train.images[:1].nbytes
        self.steps_ahead = (
            max(1, GATHER_AHEAD_BYTES[self.train.images.device.type] // share)
            if self.sampler.transform.is_permutation
            else 1
        )

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield this rank's shard of every full batch of the epoch, from step `first` on."""
        steps = self.sampler.epoch(epoch, first)
        while some := list(islice(steps, self.steps_ahead)):
            gathered = self.gather([part for parts in some for part in parts])
            for parts in some:
                yield make_batch(
                    (part.apply_mix(*next(gathered)) for part in parts),
                    self.settings.optim.batch_size,
                    parts[0].mix,
                )

    def gather(self, parts: list[MicroBatchIndices]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each micro-batch's images and labels on the device."""
        rows = copy_to_device(torch.cat([part.indices for part in parts]), self.train.images.device)
        images = self.sampler.transform.apply(
            self.train.images, rows, torch.cat([part.transform_params for part in parts])
        )
        draws = {name: torch.cat([part.draws[name] for part in parts]) for name in parts[0].draws}
        images = apply_augmentations(self.settings, images, draws, on_bytes=True)
        if self.group.device.type == "cuda" and images.device.type == "cpu":
            images = images.pin_memory()
        labels = self.train.labels.index_select(0, rows).to(self.group.device, non_blocking=True)
        sizes = [len(part.indices) for part in parts]
        normalized = apply_augmentations(self.settings, self.normalize(images), draws, on_bytes=False)
        return zip(normalized.split_with_sizes(sizes), labels.split_with_sizes(sizes), strict=True)

    def sample(self) -> Tensor:
        """Return some training images, transformed for evaluation, on the CPU."""
        sampled = self.trained[sample_slice(len(self.trained))].to(self.train.images.device)
        images = self.sampler.transform.eval_transform(self.train.images[sampled])
        return self.normalize(images.to(self.group.device)).cpu()

    def eval_batches(self, split: int, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's contiguous shard of a split, or of some of its rows."""
        data = self.train if split == TRAIN else self.test
        count = len(data) if rows is None else len(rows)
        for own in eval_batches(count, EVAL_BATCH_SIZE, self.settings, self.group):
            some = own if rows is None else rows[own].to(data.images.device)
            images = self.sampler.transform.eval_transform(data.images[some])
            yield self.normalize(images), data.labels[some].to(self.group.device)


def measure_normalization(images: Tensor, rows: Tensor, device: torch.device, *, channels_last: bool) -> Normalize:
    """Return the normalization by means and deviations of some of the images trained on, evenly spaced."""
    sample = images[rows[:: max(1, len(rows) // STATS_SAMPLE)]].float().flatten(0, 2)
    return Normalize.from_stats(sample.mean(0), sample.std(0), device, channels_last=channels_last)


def to_device(split: ImageTensors, device: torch.device) -> ImageTensors:
    """Return the split on a GPU if it needs at most a quarter of the GPU's memory, else unchanged."""
    if device.type != "cuda" or split.images.nbytes > torch.cuda.get_device_properties(device).total_memory // 4:
        return split
    return ImageTensors(split.images.to(device), split.labels.to(device))
