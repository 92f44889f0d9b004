"""The batches of a streamed data set, which a rank's threads read and decode ahead of the training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from threading import Event, Lock
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from entrypoint.core.errors import ExitCode, UserError, first_line
from train.data.decoding.decoder import decode_image, unreadable_image
from train.data.feeds.batches import IGNORE_LABEL
from train.data.feeds.load_times import LoadTimes
from train.data.sources.image_file import read_file
from train.data.sources.image_list import ImageList, UnreadableImage
from train.data.workers import WorkerSpec, WorkerThreads
from train.settings import ImageShape
from train.transforms.augment import augment_pixels
from train.transforms.image_part import PLAIN_VIEW, Pixels, View

# Images of a task at most: few, so that all threads work on the batch that is needed next.
CHUNK = 16
# Batches that are decoded ahead of the one in use.
BATCHES_AHEAD = 2
LoadedBatch = tuple[Tensor, Tensor, list[UnreadableImage]]


@dataclass(frozen=True)
class BatchRequest:
    """The images of a batch: their split, their rows in it, and a view for each if they differ.

    `augment` is the policy of the augmentation after decoding, and `draws` has each image's row of random numbers.
    `trains` says that the training loop waits for it.
    """

    split: int
    rows: Sequence[int]
    views: Sequence[View] = ()
    augment: str = "none"
    draws: Sequence[Sequence[float]] = ()
    trains: bool = False


@dataclass(frozen=True)
class ImageDataset:
    """The images of both splits; `view` is what evaluation sees, and training where a request has no views."""

    splits: tuple[ImageList, ImageList]
    shape: ImageShape
    view: View = PLAIN_VIEW

    def __getitem__(self, request: BatchRequest) -> LoadedBatch:
        """Return (N, H, W, C) bytes, labels, and the unreadable images (labeled IGNORE_LABEL)."""
        batch = PendingBatch(self, request)
        batch.decode(0, len(request.rows), LoadTimes())
        return batch.result()


class PendingBatch:
    """A batch that threads decode piece by piece into its bytes, (N, H, W, C)."""

    def __init__(self, dataset: ImageDataset, request: BatchRequest, *, pinned: bool = False) -> None:
        self.dataset, self.request = dataset, request
        channels, height, width = dataset.shape
        self.images = torch.empty(len(request.rows), height, width, channels, dtype=torch.uint8, pin_memory=pinned)
        self.pixels: Pixels = self.images.numpy()
        listing = dataset.splits[request.split]
        self.labels = torch.tensor([listing.labels[row] for row in request.rows], dtype=torch.int64)
        self.bad: dict[int, UnreadableImage] = {}
        self.left, self.lock, self.done = len(request.rows), Lock(), Event()
        self.cancelled = False
        self.error: BaseException | None = None

    def decode(self, start: int, stop: int, times: LoadTimes) -> None:
        """Read and decode the images from `start` to `stop`; errors are kept for `result`."""
        reads: list[float] = []
        cpu = time.thread_time()
        try:
            for index in range(start, stop):
                if self.cancelled:
                    break
                reads.append(self.decode_one(index))
        except BaseException as error:  # `result` raises it in the training loop
            self.error = error
        finally:
            # The quickest stands for all: others may have waited for a core or for Python's lock.
            times.add(min(reads, default=0.0) * len(reads), time.thread_time() - cpu, len(reads))
            with self.lock:
                self.left -= stop - start
                if not self.left:
                    self.done.set()

    def decode_one(self, index: int) -> float:
        """Read and decode one image; return how long reading took (s)."""
        row, began = self.request.rows[index], time.monotonic()
        path = self.dataset.splits[self.request.split].files[row]
        view = self.request.views[index] if self.request.views else self.dataset.view
        read = began
        try:
            data = read_file(path)
            read = time.monotonic()
            decode_image(data, self.pixels[index], view)
            if self.request.draws:
                augment_pixels(self.request.augment, self.pixels[index], self.request.draws[index])
        except Exception as error:  # Pillow's plug-ins raise what their parsers meet
            self.bad[index] = unreadable_image(path, error)
            self.pixels[index] = 0
        return read - began

    def wait(self) -> None:
        """Wait until all images are decoded. Signals are handled within a second."""
        while not self.done.wait(1.0):
            pass

    def result(self) -> LoadedBatch:
        """Return the decoded batch; raises what a thread met."""
        if self.error:
            raise self.error
        for index in self.bad:
            self.labels[index] = IGNORE_LABEL
        return self.images, self.labels, [self.bad[index] for index in sorted(self.bad)]


class BatchLoader:
    """Decodes the requested batches in order and ahead of their use, with the planned threads, if any.

    With `may_grow` there are more threads than planned where files take long to read.
    """

    def __init__(
        self,
        dataset: ImageDataset,
        workers: WorkerSpec,
        device: torch.device,
        *,
        may_grow: bool = False,
    ) -> None:
        self.dataset, self.workers, self.may_grow = dataset, workers, may_grow
        self.ahead = BATCHES_AHEAD if workers.count else 0
        self.pinned = device.type == "cuda"
        self.threads, self.times = WorkerThreads(workers.cpus), LoadTimes()
        self.pending: deque[PendingBatch] = deque()

    def __enter__(self) -> Self:
        """Start the threads; raises `UserError` if the system does not allow so many."""
        try:
            self.threads.grow(self.workers.count)
        except RuntimeError as error:
            count = self.workers.count
            raise UserError(f"TRAIN_NUM_WORKERS={count}: {first_line(error)}. Lower it.", ExitCode.MACHINE) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """End the threads. After an error this does not wait for them: one may hang in a file system."""
        self.drop_pending()
        if error is None:
            self.threads.stop()

    def load(self, requests: Iterable[BatchRequest]) -> Iterator[LoadedBatch]:
        """Yield each requested batch. Batches of earlier requests that nobody drew are dropped."""
        self.drop_pending()
        for request in requests:
            self.start(request)
            if len(self.pending) > self.ahead:
                yield self.finish_first()
        while self.pending:
            yield self.finish_first()

    def start(self, request: BatchRequest) -> None:
        """Have the threads decode a batch."""
        batch = PendingBatch(self.dataset, request, pinned=self.pinned)
        self.pending.append(batch)
        count = len(request.rows)
        if not self.workers.count:  # `finish_first` decodes it
            return
        size = max(1, min(CHUNK, ceil(count / len(self.threads))))
        for first in range(0, count, size):
            stop = min(first + size, count)
            self.threads.tasks.put(lambda first=first, stop=stop: batch.decode(first, stop, self.times))  # type: ignore[misc]

    def finish_first(self) -> LoadedBatch:
        """Return the oldest batch when it is decoded."""
        batch = self.pending.popleft()
        began = time.monotonic()
        if self.workers.count:
            batch.wait()
        else:
            batch.decode(0, len(batch.request.rows), self.times)
        if batch.request.trains:
            self.times.wait_s += time.monotonic() - began
        if self.may_grow:
            with suppress(RuntimeError):  # the system allows no more threads
                self.threads.grow(self.times.threads_to_keep_busy(self.workers.count))
        return batch.result()

    def drop_pending(self) -> None:
        """Drop what was requested and not drawn."""
        for batch in self.pending:
            batch.cancelled = True
        self.pending.clear()
