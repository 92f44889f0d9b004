"""Decoded images on disk, keyed by content, written atomically and shared by ranks and jobs."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
from numpy.typing import NDArray

from entrypoint.core.atomic_files import atomic_write_text
from entrypoint.core.errors import UserError
from entrypoint.core.user_dirs import PRIVATE, user_cache_dir
from train.data.image_folder import ImageList
from train.lock_file import folder_lock
from train.settings import ImageShape

# Part of every key. Increase it when decoding or the array layout changes; old entries are not read then.
VERSION = 3


@dataclass(frozen=True)
class CacheEntry:
    """A complete entry: memory-mapped bytes (N, H, W, C) and labels (N,) of both splits, and notes about them."""

    train_images: NDArray[np.uint8]
    train_labels: NDArray[np.int64]
    test_images: NDArray[np.uint8]
    test_labels: NDArray[np.int64]
    notes: dict[str, Any]


ARRAYS = ("train_images", "train_labels", "test_images", "test_labels")


def load_or_build(
    listings: tuple[ImageList, ImageList],
    shape: ImageShape,
    policy: str,
    folder: Path,
    build: Callable[[Path], dict[str, Any]],
) -> CacheEntry:
    """Return the entry of these files; it is built first if the cache has none.

    `build` writes the four arrays into a folder and returns the notes. Only one process runs it at a time; others wait.
    The key is a digest of the content of all files, but reading all files is as slow as decoding them.
    So a second key, of each file's size and times, refers to the first one while no file changes.
    The times include the change time, which no program can set.
    """
    settings = f"{VERSION}/{shape}/{policy}"
    pointer = folder / "known" / metadata_key(listings, settings)
    if entry := open_entry(folder, pointer):
        return entry
    with folder_lock(folder / "building.lock", f"another process that decodes images into {folder}"):
        if entry := open_entry(folder, pointer):
            return entry
        key = content_key(listings, settings)
        if not (folder / key).is_dir():
            build_entry(folder, key, build)
        pointer.parent.mkdir(exist_ok=True)
        atomic_write_text(pointer, key)
    entry = open_entry(folder, pointer)
    if entry is None:
        raise UserError(f"{folder / key}: the image cache cannot be read back; remove it and run again")
    return entry


def open_entry(folder: Path, pointer: Path) -> CacheEntry | None:
    """Map the arrays of an entry into memory; return None if the pointer or the entry does not exist."""
    try:
        entry = folder / pointer.read_text()
        notes = json.loads((entry / "notes.json").read_text())
        # Copy-on-write maps: ranks share the page cache, and a write by mistake does not change the file.
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="c") for name in ARRAYS}
    except (OSError, ValueError):
        return None
    return CacheEntry(**arrays, notes=notes)


def build_entry(folder: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build in a temporary folder, then rename it, so that a visible entry is always complete."""
    for leftover in folder.glob(".building-*"):  # of a killed build; the lock excludes a running one
        shutil.rmtree(leftover, ignore_errors=True)
    temp_dir = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        notes = build(temp_dir)
        (temp_dir / "notes.json").write_text(json.dumps(notes))
        for path in temp_dir.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        temp_dir.rename(folder / key)
    except OSError as error:
        raise UserError(
            f"{folder}: the image cache cannot be written ({error.strerror or error}); set TRAIN_CACHE_DIR"
        ) from None
    finally:
        shutil.rmtree(temp_dir, ignore_errors=True)


def metadata_key(listings: tuple[ImageList, ImageList], settings: str) -> str:
    """Return a digest of every file's path, label, size, inode and times."""
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for path, relative, label in iter_files(listings):
        try:
            stat = path.stat()
            state = f"{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
        except OSError as error:  # decoding names it
            state = f"unreadable {error.errno}"
        digest.update(f"{path.parent}\0{relative}\0{label}\0{state}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def content_key(listings: tuple[ImageList, ImageList], settings: str) -> str:
    """Return a digest of every file's path inside its split, label and content."""
    digest = hashlib.blake2b(settings.encode(), digest_size=16)
    for path, relative, label in iter_files(listings):
        content = digest_of_file(path)
        digest.update(f"{relative}\0{label}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def digest_of_file(path: Path) -> str:
    """Return a digest of a file's content, or why it cannot be read."""
    try:
        if not S_ISREG(path.stat().st_mode):
            return "not a file"
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        return f"unreadable {error.errno}"


def iter_files(listings: tuple[ImageList, ImageList]) -> Iterator[tuple[Path, str, int]]:
    """Yield (path, `train/` or `test/` and path inside the split, label) of every file."""
    for split, listing in zip(("train", "test"), listings, strict=True):
        skip = len(str(listing.folder)) + 1
        for path, label in zip(listing.files, listing.labels, strict=True):
            yield path, f"{split}/{str(path)[skip:]}", label


def cache_folder(configured: Path | None) -> Path:
    """Return a writable folder for the cache: the configured one, the user's, or a private one in /tmp.

    Raises `UserError` if none is writable.
    """
    if configured is not None:
        candidates = [configured]
    else:
        own = user_cache_dir(os.environ)
        candidates = [own] if own else []
        candidates.append(Path(tempfile.gettempdir(), PRIVATE.format(os.getuid())))
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if configured is not None or folder.stat().st_uid == os.getuid():
            return folder
    raise UserError(
        f"TRAIN_CACHE_DIR={configured or 'unset'}: {candidates[0]} cannot be written; name a folder that can"
    )
