"""A whole image folder to arrays, by as many processes as the node's ranks have cores."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from entrypoint.core.errors import ExitCode, UserError, first_line
from entrypoint.machine.oom import oom_message, read_memory
from entrypoint.machine.procfs import ROOT
from train.data.image_folder import ImageList, UnreadableImage, check_classes, unreadable_image_error
from train.data.pixel_values import NOT_A_FILE, open_image, swaps_sides, visible_image
from train.data.workers import WorkerPoolSpec, init_worker
from train.settings import ImageShape

CHUNK = 512


def decode_splits(
    listings: tuple[ImageList, ImageList], shape: ImageShape, policy: str, worker_pool: WorkerPoolSpec, folder: Path
) -> dict[str, Any]:
    """Write the four arrays of `train.data.cache` into the folder and return the notes.

    Raises `UserError` naming the first bad image. With the policy `skip` it leaves them out, and the notes list split,
    row in the listing, and reason of each.
    """
    skipped: list[tuple[str, int, str]] = []
    for split, listing in zip(("train", "test"), listings, strict=True):
        bad = decode_split(listing, shape, worker_pool, folder / f"{split}_images.npy")
        if bad and policy == "error":
            raise unreadable_image_error(list(bad.values()))
        skipped += [(split, row, one.reason) for row, one in bad.items()]
        labels = np.asarray(listing.labels, dtype=np.int64)
        if bad:
            good = np.setdiff1d(np.arange(len(labels)), list(bad))
            labels = labels[good]
            check_classes(listing, set(labels.tolist()), bad.values())
            images = np.load(folder / f"{split}_images.npy")[good]
            np.save(folder / f"{split}_images.npy", images)
        np.save(folder / f"{split}_labels.npy", labels)
    return {"skipped": skipped, "shape": list(shape)}


def decode_split(
    listing: ImageList, shape: ImageShape, worker_pool: WorkerPoolSpec, target: Path
) -> dict[int, UnreadableImage]:
    """Decode one split into `target`, (N, H, W, C) bytes; return the rows that could not be read."""
    channels, height, width = shape
    open_memmap(target, mode="w+", dtype=np.uint8, shape=(len(listing), height, width, channels)).flush()
    reserve_disk(target)
    # Forked, not spawned: torch has started no threads yet, and a fresh interpreter costs more than the work.
    context = multiprocessing.get_context("fork")
    memory = read_memory(ROOT)
    try:
        with ProcessPoolExecutor(
            worker_pool.processes, context, initializer=init_worker, initargs=(worker_pool.cpus,)
        ) as pool:
            decoded = pool.map(decode_chunk, chunks(listing), repeat(shape), repeat(target))
            return dict(sorted(item for chunk in decoded for item in chunk))
    except BrokenProcessPool:
        cause = oom_message(memory, read_memory(ROOT)) or "see `dmesg`; often memory is full"
        raise UserError(
            f"{listing.folder}: a process that decodes images was killed ({cause}). Use smaller images or more memory.",
            ExitCode.RANK_FAILED,
        ) from None


def reserve_disk(path: Path) -> None:
    """Allocate the whole of a file that is to be mapped; raises `OSError` if the disk or a quota is full.

    A process that writes to a mapped page for which there is no room dies of SIGBUS.
    """
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def chunks(listing: ImageList) -> Iterator[tuple[int, tuple[Path, ...]]]:
    """Yield (first row, files) in pieces."""
    for start in range(0, len(listing), CHUNK):
        yield start, tuple(listing.files[row] for row in range(start, min(start + CHUNK, len(listing))))


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


def read_image(path: Path, shape: ImageShape) -> Pixels | UnreadableImage:
    """Return an image as (height, width, channels) bytes, cut to the aspect and scaled to the size of `shape`.

    `shape` is (channels, height, width). An image that has that size is not resampled.
    """
    channels, height, width = shape
    try:
        with open_image(path) as opened:
            sides = (height, width) if swaps_sides(opened) else (width, height)
            opened.draft(None, (DRAFT_FACTOR * sides[0], DRAFT_FACTOR * sides[1]))  # does nothing unless JPEG
            image = visible_image(opened, channels)
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet: OSError, SyntaxError, struct.error
        return UnreadableImage(path, failure_reason(path, error))
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.BILINEAR)
    return np.array(image, dtype=np.uint8).reshape(height, width, channels)


def failure_reason(path: Path, error: Exception) -> str:
    """Return in a few words why a file could not be read as an image."""
    if isinstance(error, UnidentifiedImageError):
        return "empty file" if is_empty(path) else "not an image"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if str(error) == NOT_A_FILE:
        return NOT_A_FILE
    if is_empty(path):
        return "empty file"
    return f"broken image ({first_line(error) or type(error).__name__})"


def is_empty(path: Path) -> bool:
    """Return whether a file is there and has no bytes."""
    try:
        return path.stat().st_size == 0
    except OSError:
        return False
