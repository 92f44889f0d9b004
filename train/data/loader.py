"""A rank's loader workers and what they decode: forked once, before the rank has threads, and there to its end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from train.data.batches import LEFT_OUT, pins
from train.data.image_folder import Listing
from train.data.decoding import BadImage, read_picture
from train.settings import ImageShape, TrainSettings
from train.data.workers import Crew, begin_loading, serving

TRAIN, TEST = 0, 1
# A split and the rows of it that make up a batch.
Wanted = tuple[int, list[int]]
Loaded = tuple[Tensor, Tensor, list[BadImage]]


class Pictures(Dataset[Loaded]):
    """Both splits' pictures, read a list at a time; bad ones come back as values, since workers cannot refuse."""

    def __init__(self, splits: tuple[Listing, Listing], shape: ImageShape) -> None:
        self.splits, self.shape = splits, shape

    def __getitem__(self, wanted: Wanted) -> Loaded:
        """Return (N, H, W, C) bytes, labels, and the pictures that could not be read (labelled LEFT_OUT)."""
        split, rows = wanted
        listing = self.splits[split]
        channels, height, width = self.shape
        images = torch.zeros(len(rows), height, width, channels, dtype=torch.uint8)
        labels = torch.full((len(rows),), LEFT_OUT)
        bad: list[BadImage] = []
        for place, row in enumerate(rows):
            picture = read_picture(listing.files[row], self.shape)
            if isinstance(picture, BadImage):
                bad.append(picture)
            else:
                images[place] = torch.from_numpy(picture)
                labels[place] = listing.labels[row]
        return images, labels, bad


class Loader:
    """Decodes what is wanted, in order and ahead of who takes it, by the plan's loader workers, if any.

    They are forked on entry, once, and that is to be before the process group, whose threads Python gets to know now
    and then: whoever is forked at that moment waits for ever for a lock of Python's (gh-112275, before Python 3.11.10).
    Two ranks that forked for every epoch, on busy cores, met it once in 11,000 forks.
    """

    def __init__(self, pictures: Pictures, crew: Crew, settings: TrainSettings, device: torch.device) -> None:
        self.pictures = pictures
        self.wanted: list[Wanted] = []
        options: dict[str, Any] = {}
        if crew.processes:
            options = {"prefetch_factor": settings.prefetch_factor, "persistent_workers": True}
        self.batches: Iterator[Loaded] = iter(())
        self.loader: DataLoader[Loaded] | None = DataLoader(
            pictures,
            batch_size=None,
            sampler=self.wanted,
            num_workers=crew.processes,
            worker_init_fn=partial(begin_loading, crew.cpus),
            pin_memory=pins(settings, device),
            generator=torch.Generator(),  # else it draws from what the model is drawn from
            **options,
        )

    def __enter__(self) -> Self:
        """Fork the workers; raises `Refused` where they cannot be had."""
        self.begin([])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the workers: DataLoader does with its last reference."""
        self.batches, self.loader = iter(()), None

    def load(self, wanted: list[Wanted]) -> Iterator[Loaded]:
        """Yield each batch wanted; those wanted before and not taken are dropped. Raises `Refused` without workers."""
        self.begin(wanted)
        while True:
            with serving():
                batch = next(self.batches, None)
            if batch is None:
                return
            yield batch

    def begin(self, wanted: list[Wanted]) -> None:
        """Have the workers begin with what is wanted; raises `Refused` where they cannot."""
        assert self.loader is not None, "workers are there between entry and exit"
        self.wanted[:] = wanted
        with serving():
            self.batches = iter(self.loader)
