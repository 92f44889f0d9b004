"""A whole image folder to arrays, by as many processes as the node's ranks have cores."""

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

    Raises `UserError` naming the first bad image, or, with the policy `skip`, leaves them out and lists them in
    the notes.
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
    """Return the one line for images that cannot be read."""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return UserError(f"{bad[0]}{more}; repair or remove it, or set TRAIN_ON_UNREADABLE_IMAGE=skip")


def decode_split(
    listing: ImageList, shape: ImageShape, worker_pool: WorkerPoolSpec, target: Path
) -> dict[int, UnreadableImage]:
    """Decode one split into `target`, (N, H, W, C) bytes; return the rows that could not be read."""
    channels, height, width = shape
    open_memmap(target, mode="w+", dtype=np.uint8, shape=(len(listing), height, width, channels)).flush()
    # Forked, not spawned: torch has started no threads yet, and a fresh interpreter costs more than the work.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(
        worker_pool.processes, context, initializer=init_worker, initargs=(worker_pool.cpus,)
    ) as pool:
        decoded = pool.map(decode_chunk, chunks(listing), repeat(shape), repeat(target))
        return dict(sorted(item for chunk in decoded for item in chunk))


def chunks(listing: ImageList) -> Iterator[tuple[int, tuple[Path, ...]]]:
    """Yield (first row, files) in pieces."""
    for start in range(0, len(listing), CHUNK):
        yield start, listing.files[start : start + CHUNK]


def decode_chunk(
    piece: tuple[int, tuple[Path, ...]], shape: ImageShape, target: Path
) -> list[tuple[int, UnreadableImage]]:
    """Decode one piece into its rows of the array; return those that could not be read."""
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


# A photo is decoded at a half, a quarter or an eighth where that leaves so many times what is wanted: libjpeg skips the
# finest detail, which scaling down averages away (Pillow does so for its thumbnails). Measured: 3 times as fast for 12
# megapixels to 224x224, 1.8 for 3 megapixels, and 0.3 of 255 away from the whole image's pixels.
DRAFT_FACTOR = 2


Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class UnreadableImage:
    """A file that is no image, or a broken one, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        """Return the file and the reason."""
        return f"{self.path}: {self.why}"


def read_image(path: Path, shape: ImageShape) -> Pixels | UnreadableImage:
    """Return an image as (height, width, channels) bytes, cut to the aspect and scaled to the size of `shape`.

    `shape` is (channels, height, width). An image that has that size is not resampled.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as opened:
            opened.draft(None, (DRAFT_FACTOR * width, DRAFT_FACTOR * height))  # of other formats it does nothing
            image = opened.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet: OSError, SyntaxError, struct.error
        return UnreadableImage(path, failure_reason(path, error))
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
    return np.array(image, dtype=np.uint8).reshape(height, width, channels)


def failure_reason(path: Path, error: Exception) -> str:
    """Say in a few words why a file could not be read as an image."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return error.strerror or "cannot be opened"
    if path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return f"broken image ({error})"
