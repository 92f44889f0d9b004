"""Batches decoded by loader workers as they are needed, for sets too large for memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from entrypoint.errors import put
from train.batches import LEFT_OUT, Batch, Normalise, Part, batch_of, eval_slices, pins, sampled, sequence
from train.decode import refusal
from train.files import Listing
from train.group import Group
from train.pictures import BadImage, Shape, read_picture
from train.settings import TrainSettings
from train.workers import Crew, begin_loading, without_workers

EVAL_BATCH = 256
# ImageNet's means and deviations in bytes: a streamed set is not seen whole before training.
COLOUR = ((123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
GREY = ((127.5,), (64.0,))

Loaded = tuple[Tensor, Tensor, list[BadImage]]


class Pictures(Dataset[Loaded]):
    """One split's pictures, read a list at a time; bad ones come back as values, since workers cannot refuse."""

    def __init__(self, listing: Listing, shape: Shape) -> None:
        self.listing, self.shape = listing, shape

    def __getitem__(self, rows: list[int]) -> Loaded:
        """Return (N, H, W, C) bytes, labels, and the pictures that could not be read (labelled LEFT_OUT)."""
        channels, height, width = self.shape
        images = torch.zeros(len(rows), height, width, channels, dtype=torch.uint8)
        labels = torch.full((len(rows),), LEFT_OUT)
        bad: list[BadImage] = []
        for place, row in enumerate(rows):
            picture = read_picture(self.listing.files[row], self.shape)
            if isinstance(picture, BadImage):
                bad.append(picture)
            else:
                images[place] = torch.from_numpy(picture)
                labels[place] = self.listing.labels[row]
        return images, labels, bad


def served(batches: Iterable[Loaded]) -> Iterator[Loaded]:
    """Yield batches; raises `Refused` where loader workers cannot be had: their semaphores lie in /dev/shm too."""
    try:
        yield from batches
    except (OSError, EOFError) as error:
        raise without_workers(error) from None


class StreamFeed:
    """The batches of one rank, decoded ahead of the loop by the plan's loader workers."""

    def __init__(
        self,
        splits: tuple[Listing, Listing],
        shape: Shape,
        settings: TrainSettings,
        group: Group,
        crew: Crew,
    ) -> None:
        train, test = splits
        self.settings = settings
        self.group = group
        self.crew = crew
        self.sequence = sequence(len(train.files), shape, settings, group)
        self.steps_per_epoch = self.sequence.steps_per_epoch
        mean, deviation = COLOUR if shape[0] == 3 else GREY
        self.normalise = Normalise.of(
            torch.tensor(mean), torch.tensor(deviation), group.device, channels_last=settings.channels_last
        )
        self.train, self.test = Pictures(train, shape), Pictures(test, shape)
        self.told: set[str] = set()

    def train_batches(self, epoch: int, first: int = 0) -> Iterator[Batch]:
        """Yield this rank's share of every full batch of the epoch, from one on."""
        steps = list(self.sequence.epoch(epoch, first))
        loaded = self.load(self.train, [part.rows.tolist() for parts in steps for part in parts])
        for parts in steps:
            yield batch_of((self.ready(part, *next(loaded)) for part in parts), self.settings.batch_size, parts[0].mix)

    def ready(self, part: Part, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return a part's pictures as the model sees them, on the device, with their labels."""
        images = images.to(self.group.device, non_blocking=True)
        if self.sequence.transform.draw:  # without, the copy that `apply` makes would be for nothing
            images = self.sequence.transform.apply(images, torch.arange(len(images), device=images.device), part.drawn)
        return part.mixed(self.normalise(images), labels.to(self.group.device, non_blocking=True))

    def sample(self) -> Tensor:
        """Return some of the training images as evaluation would show them, on the CPU."""
        count = len(self.train.listing.files)
        images, _, _ = self.train[list(range(count)[sampled(count)])]
        return self.normalise(self.sequence.transform.judged(images.to(self.group.device))).cpu()

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's contiguous share of the test images."""
        slices = eval_slices(len(self.test.listing.files), EVAL_BATCH, self.settings, self.group)
        batches = [list(range(rows.start, rows.stop)) for rows in slices]
        for images, labels in self.load(self.test, batches):
            images = self.sequence.transform.judged(images.to(self.group.device, non_blocking=True))
            yield self.normalise(images), labels.to(self.group.device, non_blocking=True)

    def load(self, pictures: Pictures, batches: list[list[int]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bytes and labels of each list of rows, in order; refuses or tells of bad pictures."""
        options: dict[str, Any] = {"prefetch_factor": self.settings.prefetch} if self.crew.processes else {}
        loader: DataLoader[Loaded] = DataLoader(
            pictures,
            batch_size=None,
            sampler=batches,
            num_workers=self.crew.processes,
            worker_init_fn=partial(begin_loading, self.crew.cpus),
            pin_memory=pins(self.settings, self.group),
            **options,
        )
        for images, labels, bad in served(loader):
            if bad and self.settings.bad_images == "error":
                raise refusal(bad)
            for one in bad:
                self.tell(str(one))
            yield images, labels

    def tell(self, message: str) -> None:
        """Say once of each bad picture that it is left out."""
        if message not in self.told:
            self.told.add(message)
            put(f"train: left out {message}")
