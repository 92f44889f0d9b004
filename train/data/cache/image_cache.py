"""Decoded images on disk, keyed by content, written atomically, verified when opened, shared by a user's jobs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.format import open_memmap
from numpy.typing import NDArray

from entrypoint.core.atomic_files import atomic_write_text, checksum_trailer, verify_checksum
from entrypoint.core.console import log
from entrypoint.core.errors import UserError, first_line
from train.checkpoint.metadata import read_bytes
from train.data.cache.fingerprint import digest_of_file, iter_files
from train.data.decoding.decoder import read_into
from train.data.sources.image_file import OwnSplit, TarMember
from train.data.sources.image_folder import ImageList, UnreadableImage, check_classes, unreadable_image_error
from train.data.workers import WorkerSpec, init_worker
from train.lock_file import folder_lock
from train.settings import ImageShape
from train.transforms.image_part import Pixels

KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)
# What distinguishes the folder of an entry from the pointers to it.
ENTRY_SUFFIX = ".images"


# Part of every key. Increase it when decoding or the array layout changes; old entries are not read then.
VERSION = 6
ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")
NOTES_FILE = "notes.json"
# Each block of an array's file has a checksum.
BLOCK_BYTES = 4 << 20


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


def open_entry(path: Path, key: str) -> CacheEntry:
    """Map the arrays of an entry into memory; raises any error if they are not what was written."""
    notes = msgspec.json.decode(verify_checksum(read_bytes(path / NOTES_FILE)), type=Notes)
    for name in ARRAYS:
        if block_checksums(path / f"{name}.npy") != notes.checksums.get(name):
            raise ValueError(f"the checksum of {name}.npy does not match")
    # Copy-on-write maps: ranks share the page cache, and a write by mistake does not change the file.
    arrays = {name: np.load(path / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS}
    return CacheEntry(**arrays, skipped=notes.skipped, key=key)


def block_checksums(path: Path) -> tuple[int, ...]:
    """Return the CRC-32 of each block of a file; reads it with as many threads as this process has CPUs."""
    with path.open("rb") as file, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        size = os.fstat(file.fileno()).st_size
        starts = range(0, size, BLOCK_BYTES)
        return tuple(pool.map(lambda start: zlib.crc32(os.pread(file.fileno(), BLOCK_BYTES, start)), starts))


def load_or_build(source: ImageSource, folder: Path, build: Callable[[Path], dict[str, Any]]) -> CacheEntry:
    """Return the entry of these files; it is built first if the cache has none, or a damaged one.

    `build` writes the four arrays into a folder and returns the notes. Only one process runs it at a time; others wait.
    The key is a digest of the content of all files, but reading all files is as slow as decoding them.
    So a second key, of each file's size and times, refers to the first one while no file changes.
    The times include the change time, which no program can set.
    """
    pointer = folder / metadata_key(source)
    if entry := find_entry(folder, read_pointer(pointer)):
        return entry
    try:
        with folder_lock(folder / "building.lock", f"another process that decodes images into {folder}"):
            if entry := find_entry(folder, read_pointer(pointer)):
                return entry
            key = content_key(source)
            entry = find_entry(folder, key)
            if entry is None:
                build_entry(folder, key, build)
                entry = find_entry(folder, key)
            atomic_write_text(pointer, key)
    except OSError as error:
        raise UserError(
            f"{folder}: the image cache cannot be written ({error.strerror or error}); set TRAIN_CACHE_DIR"
        ) from None
    if entry is None:
        raise UserError(f"{folder}: the image cache cannot be read back; set TRAIN_CACHE_DIR to another folder")
    return entry


def read_pointer(pointer: Path) -> str:
    """Return the key that a pointer holds, empty if it cannot be read."""
    try:
        text = read_bytes(pointer, 100).decode()
    except (OSError, ValueError):
        return ""
    return text if KEY.fullmatch(text) else ""


def find_entry(folder: Path, key: str) -> CacheEntry | None:
    """Return the entry of a key, None if there is none; removes a damaged one."""
    path = folder / f"{key}{ENTRY_SUFFIX}"
    if not key or not path.is_dir():
        return None
    try:
        return open_entry(path, key)
    except Exception as error:  # numpy parses a header as Python, and raises what that meets
        log(f"{path}: decoded images are damaged ({first_line(error)}), and are decoded again")
        shutil.rmtree(path, ignore_errors=True)  # another process may have found it damaged first
        return None


def build_entry(folder: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build in a temporary folder, then rename it, so that a visible entry is always complete; raises OSError."""
    for leftover in folder.glob("building-*"):  # of a killed build; the lock excludes a running one
        shutil.rmtree(leftover, ignore_errors=True)
    temp_dir = Path(tempfile.mkdtemp(prefix="building-", dir=folder))
    try:
        skipped = build(temp_dir)["skipped"]
        checksums = {name: block_checksums(temp_dir / f"{name}.npy") for name in ARRAYS}
        text = msgspec.json.encode(Notes(skipped=tuple(map(tuple, skipped)), checksums=checksums))
        (temp_dir / NOTES_FILE).write_bytes(text + checksum_trailer(text))
        for path in temp_dir.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temp_dir.rename(folder / f"{key}{ENTRY_SUFFIX}")
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def metadata_key(source: ImageSource) -> str:
    """Return a digest of every file's path, label, size, inode and times.

    Where unreadable files are left out, it is also of whether this user can read each file.
    """
    digest = hashlib.blake2b(source.settings.encode(), digest_size=16)
    state_of = lru_cache(maxsize=1)(partial(state_on_disk, source.policy))  # of a shard, once for all its members
    for file, relative, label in iter_files(source.listings):
        if isinstance(file, TarMember):
            shard = file.shard
            known = shard.state if isinstance(shard, OwnSplit) else state_of(shard.path)
            state = f"{known}\0{file.offset}\0{file.size}"
        else:
            state = state_on_disk(source.policy, file)
        digest.update(f"{file.parent}\0{relative}\0{label}\0{state}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def state_on_disk(policy: str, path: Path) -> str:
    """Return a file's size, inode and times, with the policy `skip` also whether this user can read it."""
    try:
        status = path.stat()
    except OSError as error:  # decoding names it
        return f"unreadable {error.errno}"
    denied = policy == "skip" and not os.access(path, os.R_OK)
    state = f"{status.st_size}\0{status.st_ino}\0{status.st_mtime_ns}\0{status.st_ctime_ns}"
    return f"{state}\0no permission" if denied else state


def content_key(source: ImageSource) -> str:
    """Return a digest of every file's path inside its split, label and content."""
    digest = hashlib.blake2b(source.settings.encode(), digest_size=16)
    for path, relative, label in iter_files(source.listings):
        content = digest_of_file(path)
        digest.update(f"{relative}\0{label}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


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
        decoded = pool.map(lambda start: decode_chunk(listing, start, rows), starts)
        return dict(item for chunk in decoded for item in chunk)


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
