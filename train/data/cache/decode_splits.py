"""A whole image folder to arrays, by as many threads as the node's ranks have cores."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from train.data.decoding.decoder import read_into
from train.data.sources.image_folder import ImageList, UnreadableImage, check_classes, unreadable_image_error
from train.data.workers import WorkerSpec, init_worker
from train.settings import ImageShape
from train.transforms.image_part import Pixels

# Images of a task: a few, so that a stop does not wait for long.
CHUNK = 64


def decode_splits(
    listings: tuple[ImageList, ImageList], shape: ImageShape, policy: str, workers: WorkerSpec, folder: Path
) -> dict[str, Any]:
    """Write the four arrays of `train.data.cache.image_cache` into the folder and return the notes.

    Raises `UserError` naming the first bad image. With the policy `skip` it leaves them out, and the notes list split,
    row in the listing, and reason of each.
    """
    skipped: list[tuple[str, int, str]] = []
    for split, listing in zip(("train", "test"), listings, strict=True):
        bad = decode_split(listing, shape, workers, folder / f"{split}_images.npy")
        if bad and policy == "error":
            raise unreadable_image_error(list(bad.values()))
        skipped += [(split, row, one.reason) for row, one in bad.items()]
        labels = np.asarray(listing.labels, dtype=np.int64)
        if bad:
            good = np.setdiff1d(np.arange(len(labels)), list(bad))
            labels = labels[good]
            check_classes(listing, set(labels.tolist()), bad)
            images = np.load(folder / f"{split}_images.npy")[good]
            np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", labels)
    return {"skipped": skipped, "shape": list(shape)}


def decode_split(
    listing: ImageList, shape: ImageShape, workers: WorkerSpec, target: Path
) -> dict[int, UnreadableImage]:
    """Decode one split into `target`, (N, H, W, C) bytes; return the rows that could not be read."""
    channels, height, width = shape
    rows = open_memmap(target, mode="w+", dtype=np.uint8, shape=(len(listing), height, width, channels))
    rows.flush()
    reserve_disk(target)
    starts = range(0, len(listing), CHUNK)
    with ThreadPoolExecutor(workers.count, initializer=init_worker, initargs=(workers.cpus,)) as pool:
        try:
            decoded = pool.map(lambda start: decode_chunk(listing, start, rows), starts)
            return dict(item for chunk in decoded for item in chunk)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def reserve_disk(path: Path) -> None:
    """Allocate the whole of a file that is to be mapped; raises `OSError` if the disk or a quota is full.

    A process that writes to a mapped page for which there is no room dies of SIGBUS.
    """
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def decode_chunk(listing: ImageList, start: int, rows: Pixels) -> list[tuple[int, UnreadableImage]]:
    """Decode the images from row `start` on into their rows of the array; return those that could not be read."""
    bad: list[tuple[int, UnreadableImage]] = []
    for row in range(start, min(start + CHUNK, len(listing))):
        if problem := read_into(listing.files[row], rows[row]):
            bad.append((row, problem))
    return bad
