"""Decodes a whole image folder into arrays, with one process per core of the node's ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from entrypoint.core.errors import UserError
from train.data.image_folder import ImageList
from train.data.workers import WorkerPoolSpec, init_worker
from train.settings import ImageShape

CHUNK = 512


def decode_splits(
    listings: tuple[ImageList, ImageList], shape: ImageShape, policy: str, worker_pool: WorkerPoolSpec, folder: Path
) -> dict[str, Any]:
    """Write the four arrays of `train.data.cache` into the folder and return the notes.

    Raises `UserError` with the first unreadable image.
    With the policy `skip`, unreadable images are left out and listed in the notes.
    """
    skipped: list[str] = []
    for split, listing in zip(("train", "test"), listings, strict=True):
        bad = decode_split(listing, shape, worker_pool, folder / f"{split}_images.npy")
        if bad and policy == "error":
            raise unreadable_image_error(list(bad.values()))
        skipped += map(str, bad.values())
        labels = np.asarray(listing.labels, dtype=np.int64)
        if bad:
            good = np.setdiff1d(np.arange(len(labels)), list(bad))
            if not len(good):
                raise unreadable_image_error(list(bad.values()))
            labels = labels[good]
            images = np.load(folder / f"{split}_images.npy")[good]
            np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", labels)
    return {"skipped": skipped, "shape": list(shape)}


def unreadable_image_error(bad: list[UnreadableImage]) -> UserError:
    """Return the one-line error for unreadable images."""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return UserError(f"{bad[0]}{more}; repair or remove it, or set TRAIN_ON_UNREADABLE_IMAGE=skip")


def decode_split(
    listing: ImageList, shape: ImageShape, worker_pool: WorkerPoolSpec, target: Path
) -> dict[int, UnreadableImage]:
    """Decode one split into `target`, (N, H, W, C) bytes; return the unreadable images by row."""
    channels, height, width = shape
    open_memmap(target, mode="w+", dtype=np.uint8, shape=(len(listing), height, width, channels)).flush()
    # Forked, not spawned: torch has no threads yet, and the start of an interpreter takes longer than the work.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        worker_pool.processes, context, initializer=init_worker, initargs=(worker_pool.cpus,)
    ) as pool:
        decoded = pool.map(decode_chunk, chunks(listing), repeat(shape), repeat(target))
        return dict(sorted(item for chunk in decoded for item in chunk))


def chunks(listing: ImageList) -> Iterator[tuple[int, tuple[Path, ...]]]:
    """Yield (first row, files) of each chunk."""
    for start in range(0, len(listing), CHUNK):
        yield start, listing.files[start : start + CHUNK]


def decode_chunk(
    piece: tuple[int, tuple[Path, ...]], shape: ImageShape, target: Path
) -> list[tuple[int, UnreadableImage]]:
    """Decode one chunk into its rows of the array; return the unreadable images with their rows."""
    start, files = piece
    rows = np.load(target, mmap_mode="r+")
    bad: list[tuple[int, UnreadableImage]] = []
    for row, path in enumerate(files, start):
        image = read_image(path, shape)
        if isinstance(image, UnreadableImage):
            bad.append((row, image))
        else:
            rows[row] = image
    return bad


# libjpeg decodes a photo at 1/2, 1/4 or 1/8 of its size if that is at least this many times the wanted size.
# Why: it skips the finest detail, which the following reduction would average away. Pillow's thumbnails do the same.
DRAFT_FACTOR = 2


Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class UnreadableImage:
    """A file that is not an image or is damaged, and the reason."""

    path: Path
    reason: str

    def __str__(self) -> str:
        """Return the file and the reason."""
        return f"{self.path}: {self.reason}"


def read_image(path: Path, shape: ImageShape) -> Pixels | UnreadableImage:
    """Return an image as (height, width, channels) bytes, cropped and resized to the size of `shape`.

    `shape` is (channels, height, width). An image of that size is not resampled.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as opened:
            opened.draft(None, (DRAFT_FACTOR * width, DRAFT_FACTOR * height))  # only JPEG supports it
            image = opened.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's plug-ins raise OSError, SyntaxError, struct.error and others
        return UnreadableImage(path, failure_reason(path, error))
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
    return np.array(image, dtype=np.uint8).reshape(height, width, channels)


def failure_reason(path: Path, error: Exception) -> str:
    """Return in a few words why a file is not readable as an image."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return error.strerror or "cannot be opened"
    if path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return f"broken image ({error})"
