"""Batches of this rank: its shard of each global batch, on the device, as normalized floats."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from train.data.feeds.load_times import LoadReport
from train.data.val_split import TEST, SplitRows
from train.distributed.process_group import ProcessGroup
from train.seeding import epoch_permutation, make_generator, shard_slice
from train.settings import ImageShape, TrainSettings
from train.transforms.augmentations import AUGMENTATIONS, Draws, MixParams, sample_mix
from train.transforms.normalize import Normalize
from train.transforms.registry import Transform, select_transform

# The label of an unreadable image. Loss and evaluation ignore it.
IGNORE_LABEL = -1
# Sample size: enough images for the covariance of small patches.
SAMPLE_IMAGES = 1000


@dataclass(frozen=True)
class Batch:
    """This rank's shard of a global batch of `size` images, as one or more micro-batches of (images, labels).

    With mixup or CutMix, `mixed_labels` are the partners' labels, and `mix_weight` is the weight of the own labels.
    Images are normalized (N, C, H, W) floats in the selected memory format. Labels are (N,) int64 or IGNORE_LABEL.
    """

    micro_batches: tuple[tuple[Tensor, Tensor], ...]
    size: int
    mixed_labels: tuple[Tensor, ...] = ()
    mix_weight: float = 1.0


@dataclass(frozen=True)
class MicroBatchIndices:
    """Images of one micro-batch of a rank: their rows in the split, their transform parameters and augmentation draws.

    If they are mixed, the second half are the partners of the first half.
    """

    indices: Tensor
    transform_params: Tensor
    mix: MixParams | None = None
    draws: Draws = field(default_factory=dict)

    def apply_mix(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return (images, labels, labels of the partners) after mixing; the last is None without mixing."""
        if self.mix is None:
            return images, labels, None
        own_labels, other_labels = labels.chunk(2)
        return self.mix.apply(*images.chunk(2)), own_labels, other_labels


def make_batch(parts: Iterable[tuple[Tensor, Tensor, Tensor | None]], size: int, mix: MixParams | None) -> Batch:
    """Return the batch of a rank's micro-batches, given as `MicroBatchIndices.apply_mix` returns them."""
    parts = tuple(parts)
    others = tuple(other for _, _, other in parts if other is not None)
    return Batch(tuple((images, labels) for images, labels, _ in parts), size, others, mix.own_weight if mix else 1.0)


@dataclass(frozen=True)
class BatchSampler:
    """Selects the images of each step, and this rank's shard of them; `rows` are those of the images trained on.

    `labels` are their classes where each class is drawn equally often.

    Order and augmentation are sampled for whole global batches.
    These are divided into micro-batches for gradient accumulation first, then among the ranks.
    Why: BatchNorm computes its statistics over the same images on any number of ranks.
    """

    images: int
    shape: ImageShape
    transform: Transform
    settings: TrainSettings
    group: ProcessGroup
    rows: Tensor | None = None
    labels: Tensor | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of full batches in the split."""
        return self.images // self.settings.optim.batch_size

    def epoch(self, epoch: int, first: int = 0) -> Iterator[tuple[MicroBatchIndices, ...]]:
        """Yield this rank's micro-batches of each step, from step `first` of the epoch on."""
        size, seed, parts = (
            self.settings.optim.batch_size,
            self.settings.optim.seed,
            self.settings.optim.grad_accum_steps,
        )
        order = self.order_of(epoch)
        whole = [torch.arange(size)[shard_slice(size, part, parts)] for part in range(parts)]
        shards = [part[shard_slice(len(part), self.group.rank, self.group.world_size)] for part in whole]
        counts = {name: augmentation.count_draws(self.settings) for name, augmentation in AUGMENTATIONS.items()}
        mixed_epochs = self.settings.optim.total_epochs(self.steps_per_epoch) - self.settings.data.unmixed_epochs
        is_mixed = epoch < mixed_epochs and (self.settings.data.mixup_alpha or self.settings.data.cutmix_alpha)
        for step in range(first, self.steps_per_epoch):
            rows = order[step * size : (step + 1) * size]
            params = torch.empty(size, 0)
            if self.transform.sample_params:
                params = self.transform.sample_params(size, self.shape[1], make_generator(seed, "augment", epoch, step))
            draws = {
                name: torch.rand(size, count, generator=make_generator(seed, name, epoch, step))
                for name, count in counts.items()
                if count
            }
            mix: MixParams | None = None
            if is_mixed:
                sides = self.transform.shape(self.shape)[1:]
                mix = sample_mix(size, *sides, self.settings.data, make_generator(seed, "mix", epoch, step))
            parts_of_step = shards
            if mix:
                parts_of_step = [torch.cat((own, mix.partner_indices[own])) for own in shards]
            yield tuple(
                MicroBatchIndices(rows[own], params[own], mix, {name: numbers[own] for name, numbers in draws.items()})
                for own in parts_of_step
            )

    def order_of(self, epoch: int) -> Tensor:
        """Return the images of an epoch in order; with repeated augmentation, each is there several times in a row."""
        order = epoch_permutation(self.images, self.settings.optim.seed, epoch)
        if self.labels is not None:
            chances = 1 / torch.bincount(self.labels)[self.labels].double()
            random = make_generator(self.settings.optim.seed, "balance", epoch)
            order = torch.multinomial(chances, self.images, replacement=True, generator=random)
        order = order if self.rows is None else self.rows[order]
        times = self.settings.data.repeated_augment
        return order if times == 1 else order[: -(-self.images // times)].repeat_interleave(times)[: self.images]


class BatchSource:
    """The batches of a rank. Training batches depend on seed and epoch only, not on the number of ranks.

    `skipped` are the files that this rank could not read, each with the reason.
    """

    normalize: Normalize

    def __init__(
        self, labels: Tensor, shape: ImageShape, settings: TrainSettings, group: ProcessGroup, rows: SplitRows
    ) -> None:
        self.settings, self.group, self.rows = settings, group, rows
        trained = labels if rows.train is None else labels[rows.train]
        self.sampler = BatchSampler(
            len(trained),
            shape,
            select_transform(settings.data, shape[0]),
            settings,
            group,
            rows.train,
            trained.cpu() if settings.optim.balance else None,
        )
        self.steps_per_epoch = self.sampler.steps_per_epoch
        self.skipped: set[str] = set()

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield the epoch's full batches from step `first` on; the remaining images are not used."""
        raise NotImplementedError

    def eval_batches(self, split: int, rows: Tensor | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's contiguous shard of a split, TRAIN or TEST, or of some of its rows."""
        raise NotImplementedError

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's shard of the test images; each image is on exactly one rank."""
        return self.eval_batches(TEST, self.rows.test)

    @property
    def has_val(self) -> bool:
        """Whether there are images that choose the best checkpoint, besides the test images."""
        return self.rows.val is not None

    def sample(self) -> Tensor:
        """Return some training images, transformed for evaluation, on the CPU and identical on every rank."""
        raise NotImplementedError

    def load_report(self, train_seconds: float) -> LoadReport | None:  # noqa: ARG002
        """Return what the loading cost a training of so many seconds, None for images in memory."""
        return None


def eval_batches(count: int, default_size: int, settings: TrainSettings, group: ProcessGroup) -> Iterator[slice]:
    """Yield this rank's contiguous shard of range(count), one evaluation batch at a time."""
    shard = shard_slice(count, group.rank, group.world_size)
    size = default_size if settings.run.eval_batch_size == "auto" else settings.run.eval_batch_size
    for start in range(shard.start, shard.stop, size):
        yield slice(start, min(start + size, shard.stop))


def sample_slice(count: int) -> slice:
    """Return the rows of the sample among `count` images."""
    return slice(0, count, max(1, count // SAMPLE_IMAGES))
