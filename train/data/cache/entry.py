"""One entry of the image cache: what it holds, and whether that is what was written."""

from __future__ import annotations

import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from entrypoint.core.atomic_files import verify_checksum
from entrypoint.core.errors import first_line
from train.checkpoint.metadata import read_bytes
from train.data.sources.image_folder import ImageList
from train.settings import ImageShape

# Part of every key. Increase it when decoding or the array layout changes; old entries are not read then.
VERSION = 6
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
NOTES_FILE = "notes.json"
# Each block of an array's file has a checksum.
BLOCK_BYTES = 4 << 20


class DamagedEntry(Exception):
    """Raised for an entry that does not hold what was written into it."""


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry's builder wrote down: left-out files as (split, row, reason), and a CRC-32 of each block."""

    skipped: tuple[tuple[str, int, str], ...]
    checksums: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CacheEntry:
    """A complete entry: memory-mapped bytes (N, H, W, C) and labels (N,) of both splits.

    `skipped` has the files that were left out as (split, row, reason). `key` is a digest of the content of all files.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    skipped: tuple[tuple[str, int, str], ...]
    key: str


@dataclass(frozen=True)
class ImageSource:
    """The images that an entry is made of: files, the shape that they get, and what happens to unreadable ones."""

    listings: tuple[ImageList, ImageList]
    shape: ImageShape
    policy: str

    @property
    def settings(self) -> str:
        """What besides the files decides on the content of an entry."""
        return f"{VERSION}/{self.shape}/{self.policy}"

    @property
    def classes(self) -> int:
        """Number of classes."""
        return len(self.listings[0].classes)


def open_entry(path: Path, key: str) -> CacheEntry:
    """Map the arrays of an entry into memory; raises `DamagedEntry` if they are not what was written."""
    try:
        notes = msgspec.json.decode(verify_checksum(read_bytes(path / NOTES_FILE)), type=Notes)
        for name in ARRAYS:
            if block_checksums(path / f"{name}.npy") != notes.checksums.get(name):
                raise DamagedEntry(f"the checksum of {name}.npy does not match")
        # Copy-on-write maps: ranks share the page cache, and a write by mistake does not change the file.
        arrays = {name: np.load(path / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS}
    except FileNotFoundError:
        if not path.is_dir():
            raise
        raise DamagedEntry("a file is missing") from None
    except DamagedEntry:
        raise
    except Exception as error:  # numpy parses a header as Python, and raises what that meets
        raise DamagedEntry(first_line(error)) from None
    return CacheEntry(**arrays, skipped=notes.skipped, key=key)


def block_checksums(path: Path) -> tuple[int, ...]:
    """Return the CRC-32 of each block of a file; reads it with as many threads as this process has CPUs."""
    with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, BLOCK_BYTES)
        return tuple(pool.map(lambda start: zlib.crc32(os.pread(file.fileno(), BLOCK_BYTES, start)), starts))
