"""A rank's loader workers and the images that they decode; forked once, before the rank has threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from train.data.batches import IGNORE_LABEL, use_pinned_memory
from train.data.decoding import read_image
from train.data.image_folder import ImageList, UnreadableImage
from train.data.workers import WorkerPoolSpec, init_loader_worker, translate_worker_errors
from train.settings import ImageShape, TrainSettings

TRAIN, TEST = 0, 1
# A split, and the rows of a batch in it.
BatchRequest = tuple[int, list[int]]
LoadedBatch = tuple[Tensor, Tensor, list[UnreadableImage]]


class ImageDataset(Dataset[LoadedBatch]):
    """The images of both splits, read one batch at a time.

    Unreadable images are returned as values, because the exception of a worker does not reach the rank unchanged.
    """

    def __init__(self, splits: tuple[ImageList, ImageList], shape: ImageShape) -> None:
        self.splits, self.shape = splits, shape

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        """Return (N, H, W, C) bytes, labels, and the unreadable images (labeled IGNORE_LABEL)."""
        split, rows = request
        listing = self.splits[split]
        channels, height, width = self.shape
        images = torch.zeros(len(rows), height, width, channels, dtype=torch.uint8)
        labels = torch.full((len(rows),), IGNORE_LABEL)
        bad: list[UnreadableImage] = []
        for index, row in enumerate(rows):
            image = read_image(listing.files[row], self.shape)
            if isinstance(image, UnreadableImage):
                bad.append(image)
            else:
                images[index] = torch.from_numpy(image)
                labels[index] = listing.labels[row]
        return images, labels, bad


class RequestQueue:
    """The requests of the current epoch, which DataLoader draws one by one; each iteration continues with the rest.

    Why: a list of the indices of a whole epoch would grow with the data set.
    """

    def __init__(self) -> None:
        self.requests: Iterator[BatchRequest] = iter(())

    def __iter__(self) -> Iterator[BatchRequest]:
        """Return the iterator over the requests that are left."""
        return self.requests


class BatchLoader:
    """Decodes the requested batches in order and ahead of their use, with the planned loader workers, if any.

    The workers are forked once, on entry, before the process group exists.
    Why: the group's threads register with Python, and a fork at that moment can deadlock (gh-112275, fixed in 3.11.10).
    """

    def __init__(
        self, dataset: ImageDataset, worker_pool: WorkerPoolSpec, settings: TrainSettings, device: torch.device
    ) -> None:
        self.dataset = dataset
        self.queue = RequestQueue()
        options: dict[str, Any] = {}
        if worker_pool.processes:
            options = {"prefetch_factor": settings.prefetch_factor, "persistent_workers": True}
        self.batches: Iterator[LoadedBatch] = iter(())
        self.loader: DataLoader[LoadedBatch] | None = DataLoader(
            dataset,
            batch_size=None,
            sampler=self.queue,
            num_workers=worker_pool.processes,
            worker_init_fn=partial(init_loader_worker, worker_pool.cpus),
            pin_memory=use_pinned_memory(settings, device),
            generator=torch.Generator(),  # otherwise it advances the generator of the model's weights
            **options,
        )

    def __enter__(self) -> Self:
        """Fork the workers; raises `UserError` if that fails."""
        self.start([])
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop the workers: DataLoader stops them when its last reference is gone."""
        self.batches, self.loader = iter(()), None

    def load(self, requests: Iterable[BatchRequest]) -> Iterator[LoadedBatch]:
        """Yield each requested batch, and discard the remaining batches of earlier requests.

        Raises `UserError` if the workers are lost.
        """
        self.start(requests)
        while True:
            with translate_worker_errors():
                batch = next(self.batches, None)
            if batch is None:
                return
            yield batch

    def start(self, requests: Iterable[BatchRequest]) -> None:
        """Submit the requests to the workers; raises `UserError` if the workers cannot start."""
        assert self.loader is not None, "workers are there between entry and exit"
        self.queue.requests = iter(requests)
        with translate_worker_errors():
            self.batches = iter(self.loader)
