"""Batches that are decoded during training, for data sets too large for memory."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee

import torch
from torch import Tensor

from entrypoint.core.console import write_stderr
from train.data.feeds.batches import Batch, BatchSource, MicroBatchIndices, eval_batches, make_batch, sample_slice
from train.data.feeds.load_times import LoadReport
from train.data.feeds.loader import BatchLoader, BatchRequest
from train.data.sources.image_list import unreadable_image_error
from train.data.val_split import ALL_ROWS, TRAIN, SplitRows
from train.distributed.process_group import ProcessGroup
from train.settings import STREAM_EVAL_BATCH_SIZE, TrainSettings
from train.transforms.augmentations import POLICY, apply_augmentations
from train.transforms.normalize import Normalize

# Lines about unreadable images, for each rank.
MAX_WARNINGS = 50


class StreamSource(BatchSource):
    """The batches of one rank, decoded by the planned threads ahead of the training loop."""

    def __init__(
        self,
        loader: BatchLoader,
        settings: TrainSettings,
        group: ProcessGroup,
        normalize: Normalize | None = None,
        rows: SplitRows = ALL_ROWS,
    ) -> None:
        self.loader, self.dataset = loader, loader.dataset
        labels = torch.frombuffer(self.dataset.splits[TRAIN].labels, dtype=torch.int64)
        super().__init__(labels, self.dataset.shape, settings, group, rows)
        self.normalize = normalize or self.measure_normalization()

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield this rank's shard of every full batch of the epoch, from step `first` on."""
        steps, ahead = tee(self.sampler.epoch(epoch, first))  # keeps the steps that are requested and not yet used
        loaded = self.load(self.request(part) for parts in ahead for part in parts)
        for parts in steps:
            on_device = (self.to_device(part, *next(loaded)) for part in parts)
            yield make_batch(on_device, self.settings.optim.batch_size, parts[0].mix)

    def request(self, part: MicroBatchIndices) -> BatchRequest:
        """Return what the loader needs to know of a micro-batch."""
        transform, (_, height, width) = self.sampler.transform, self.dataset.shape
        views = transform.train_views(part.transform_params, (width, height)) if transform.train_views else ()
        in_threads = self.augments_in_threads and POLICY in part.draws
        return BatchRequest(
            split=TRAIN,
            rows=part.indices.tolist(),
            views=views,
            augment=self.settings.data.augment if in_threads else "none",
            draws=part.draws[POLICY].tolist() if in_threads else (),
            trains=True,
        )

    @property
    def augments_in_threads(self) -> bool:
        """Whether the threads that decode also augment: unless a transform comes between."""
        transform = self.sampler.transform
        return bool(transform.train_views or not transform.sample_params)

    def to_device(
        self, part: MicroBatchIndices, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a step's micro-batch as the model gets it, on the device, with its labels."""
        began = time.monotonic()
        images = images.to(self.group.device, non_blocking=True)
        if self.sampler.transform.sample_params and not self.sampler.transform.train_views:
            images = self.sampler.transform.apply(
                images, torch.arange(len(images), device=images.device), part.transform_params
            )
        if not self.augments_in_threads:
            images = apply_augmentations(self.settings, images, part.draws, on_bytes=True)
        normalized = apply_augmentations(self.settings, self.normalize(images), part.draws, on_bytes=False)
        self.loader.times.copy_s += time.monotonic() - began
        return part.apply_mix(normalized, labels.to(self.group.device, non_blocking=True))

    def sampled_rows(self) -> Sequence[int]:
        """Return the rows of some training images."""
        numbers = range(len(self.dataset.splits[TRAIN])) if self.rows.train is None else self.rows.train.tolist()
        return numbers[sample_slice(len(numbers))]

    def measure_normalization(self) -> Normalize:
        """Return the normalization by some training images, transformed for evaluation: TRAIN_NORMALIZE=data."""
        images, _, _ = self.dataset[BatchRequest(TRAIN, self.sampled_rows())]
        pixels = self.sampler.transform.after_decoding(images).float().flatten(0, 2)
        return Normalize.from_stats(
            pixels.mean(0), pixels.std(0), self.group.device, channels_last=self.settings.compute.channels_last
        )

    def sample(self) -> Tensor:
        """Return some training images, transformed for evaluation, on the CPU."""
        images, _, _ = self.dataset[BatchRequest(TRAIN, self.sampled_rows())]
        return self.normalize(self.sampler.transform.after_decoding(images.to(self.group.device))).cpu()

    def eval_batches(self, split: int, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's contiguous shard of a split, or of some of its rows."""
        numbers = range(len(self.dataset.splits[split])) if rows is None else rows.tolist()
        slices = eval_batches(len(numbers), STREAM_EVAL_BATCH_SIZE, self.settings, self.group)
        for images, labels in self.load(BatchRequest(split, numbers[own]) for own in slices):
            images = self.sampler.transform.after_decoding(images.to(self.group.device, non_blocking=True))
            yield self.normalize(images), labels.to(self.group.device, non_blocking=True)

    def load_report(self, train_seconds: float) -> LoadReport | None:
        """Return what the loading cost a training of so many seconds."""
        return self.loader.times.report(train_seconds, len(self.loader.threads))

    def load(self, requests: Iterable[BatchRequest]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes and labels of each batch in order; unreadable images raise `UserError` or are reported."""
        for images, labels, bad in self.loader.load(requests):
            if bad and self.settings.data.on_unreadable_image == "error":
                raise unreadable_image_error(bad)
            for image in bad:
                self.warn_once(str(image))
            yield images, labels

    def warn_once(self, message: str) -> None:
        """Report once that an unreadable image is left out; many are counted in the summary only."""
        if message in self.skipped:
            return
        self.skipped.add(message)
        if len(self.skipped) <= MAX_WARNINGS:
            write_stderr(f"train: skipped {message}")
        if len(self.skipped) == MAX_WARNINGS:
            write_stderr("train: further unreadable images are not printed; images_skipped in summary.json counts them")
