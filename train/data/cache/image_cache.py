"""Decoded images on disk, written atomically, verified when opened, shared by a user's jobs."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec
import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, first_line
from entrypoint.core.files import checksum_trailer, verify_checksum
from train.checkpoint.metadata import read_bytes
from train.data.cache.fingerprint import iter_files
from train.data.decoding.decoder import read_into
from train.data.sources.image_file import TarMember
from train.data.sources.image_list import ImageList, UnreadableImage, check_classes, unreadable_image_error
from train.data.workers import WorkerSpec, init_worker
from train.lock_file import folder_lock
from train.settings import ImageShape
from train.transforms.image_part import Pixels

Skipped = tuple[tuple[str, int, str], ...]
# Part of every key. Increase it when decoding or the array layout changes; old entries are not read then.
VERSION = 7
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
NOTES_FILE = "notes.json"
# Each block of an array's file has a checksum.
BLOCK_BYTES = 4 << 20


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """What an entry's builder wrote down: left-out files as (split, row, reason), and a CRC-32 of each block."""

    skipped: Skipped
    checksums: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class CacheEntry:
    """A complete entry: memory-mapped bytes (N, H, W, C) and labels (N,) of both splits.

    `skipped` has the files that were left out as (split, row, reason). `content` is a digest of all that is decoded.
    """

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    skipped: Skipped
    content: str


@dataclass(frozen=True)
class ImageSource:
    """The images that an entry is made of: files, the shape that they get, and what happens to unreadable ones."""

    listings: tuple[ImageList, ImageList]
    shape: ImageShape
    policy: str

    @property
    def key(self) -> str:
        """A digest of what decides on the entry: shape, policy, and every file's path, label, size, inode and times.

        The times include the change time, which no program can set.
        """
        digest = hashlib.blake2b(f"{VERSION}/{self.shape}/{self.policy}".encode(), digest_size=16)
        for shard in chain.from_iterable(listing.files.shards for listing in self.listings):
            digest.update(f"{shard.state}\0{shard.size}\0{shard.mtime_ns}\0{shard.ctime_ns}\0".encode())
        for file, relative, label in iter_files(self.listings):
            state = f"{file.start}\0{file.size}" if isinstance(file, TarMember) else state_on_disk(file)
            digest.update(f"{relative}\0{label}\0{state}\0".encode(errors="surrogateescape"))
        return digest.hexdigest()


def state_on_disk(path: Path) -> str:
    """Return a file's size, inode and times."""
    try:
        status = path.stat()
    except OSError as error:  # decoding names it
        return f"unreadable {error.errno}"
    return f"{status.st_size}\0{status.st_ino}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"


def open_entry(path: Path) -> CacheEntry:
    """Map the arrays of an entry into memory; raises any error if they are not what was written."""
    notes = msgspec.json.decode(verify_checksum(read_bytes(path / NOTES_FILE)), type=Notes)
    for name in ARRAYS:
        if block_checksums(path / f"{name}.npy") != notes.checksums.get(name):
            raise ValueError(f"the checksum of {name}.npy does not match")
    # Copy-on-write maps: ranks share the page cache, and a write by mistake does not change the file.
    arrays = {name: np.load(path / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS}
    content = hashlib.blake2b(msgspec.json.encode(notes.checksums), digest_size=16).hexdigest()
    return CacheEntry(**arrays, skipped=notes.skipped, content=content)


def block_checksums(path: Path) -> tuple[int, ...]:
    """Return the CRC-32 of each block of a file; reads it with as many threads as this process has CPUs."""
    with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, BLOCK_BYTES)
        return tuple(pool.map(lambda start: zlib.crc32(os.pread(file.fileno(), BLOCK_BYTES, start)), starts))


def load_or_build(source: ImageSource, folder: Path, build: Callable[[Path], Skipped]) -> CacheEntry:
    """Return the entry of these files; it is built first if the cache has none, or a damaged one.

    `build` writes the four arrays into a folder, and returns the files that it left out. Only one process runs it at a
    time; others wait.
    """
    path = folder / f"{source.key}.images"
    if entry := find_entry(path):
        return entry
    try:
        with folder_lock(folder / "building.lock", f"another process that decodes images into {folder}"):
            if entry := find_entry(path):
                return entry
            build_entry(path, build)
    except OSError as error:
        raise UserError(
            f"{folder}: the image cache cannot be written ({error.strerror or error}); set TRAIN_CACHE_DIR"
        ) from None
    entry = find_entry(path)
    if entry is None:
        raise UserError(f"{folder}: the image cache cannot be read back; set TRAIN_CACHE_DIR to another folder")
    return entry


def find_entry(path: Path) -> CacheEntry | None:
    """Return an entry, None if there is none; removes a damaged one."""
    if not path.is_dir():
        return None
    try:
        return open_entry(path)
    except Exception as error:  # numpy parses a header as Python, and raises what that meets
        log(f"{path}: decoded images are damaged ({first_line(error)}), and are decoded again")
        shutil.rmtree(path, ignore_errors=True)  # another process may have found it damaged first
        return None


def build_entry(path: Path, build: Callable[[Path], Skipped]) -> None:
    """Build in a temporary folder, then rename it, so that a visible entry is always complete; raises OSError."""
    for leftover in path.parent.glob("building-*"):  # of a killed build; the lock excludes a running one
        shutil.rmtree(leftover, ignore_errors=True)
    temp_dir = Path(tempfile.mkdtemp(prefix="building-", dir=path.parent))
    try:
        skipped = build(temp_dir)
        checksums = {name: block_checksums(temp_dir / f"{name}.npy") for name in ARRAYS}
        text = msgspec.json.encode(Notes(skipped=skipped, checksums=checksums))
        (temp_dir / NOTES_FILE).write_bytes(text + checksum_trailer(text))
        for file_path in temp_dir.iterdir():
            with file_path.open("rb") as file:
                os.fsync(file.fileno())
        temp_dir.rename(path)
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


# Images of a task: a few, so that a stop does not wait for long.
CHUNK = 64


def decode_splits(
    listings: tuple[ImageList, ImageList], shape: ImageShape, policy: str, workers: WorkerSpec, folder: Path
) -> Skipped:
    """Write the four arrays into the folder.

    Raises `UserError` naming the first bad image. With the policy `skip` it leaves them out, and returns split, row in
    the listing, and reason of each.
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
    return tuple(skipped)


def decode_split(
    listing: ImageList, shape: ImageShape, workers: WorkerSpec, target: Path
) -> dict[int, UnreadableImage]:
    """Decode one split into `target`, (N, H, W, C) bytes; return the rows that could not be read."""
    channels, height, width = shape
    rows = open_memmap(target, mode="w+", dtype=np.uint8, shape=(len(listing), height, width, channels))
    rows.flush()
    with target.open("r+b") as file:  # a process that writes to a mapped page without room on the disk dies of SIGBUS
        os.posix_fallocate(file.fileno(), 0, target.stat().st_size)
    starts = range(0, len(listing), CHUNK)
    with ThreadPoolExecutor(workers.count, initializer=init_worker, initargs=(workers.cpus,)) as pool:
        decoded = pool.map(lambda start: decode_chunk(listing, start, rows), starts)
        return dict(item for chunk in decoded for item in chunk)


def decode_chunk(listing: ImageList, start: int, rows: Pixels) -> list[tuple[int, UnreadableImage]]:
    """Decode the images from row `start` on into their rows of the array; return those that could not be read."""
    bad: list[tuple[int, UnreadableImage]] = []
    for row in range(start, min(start + CHUNK, len(listing))):
        if problem := read_into(listing.files[row], rows[row]):
            bad.append((row, problem))
    return bad
