"""Decoded images on disk, keyed by content: built once, whole or not at all, shared by ranks and jobs."""

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

# Part of every key: raise it when decoding or the layout changes, and old entries are never read again.
VERSION = 3


@dataclass(frozen=True)
class CacheEntry:
    """A finished entry: bytes (N, H, W, C) and labels (N,) of both splits, memory-mapped, and notes on them."""

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
    """Return the entry of these files, built first where there is none.

    `build` writes the four arrays into the folder it is given and returns the notes; it runs in one process at
    a time, while others wait. The key is the content of all files. Since reading them all only to find the key
    would cost as much as decoding, a second key, of every file's size and times (the change time among them,
    which no program can set), leads to the first where nothing was touched.
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
    """Map an entry's arrays, None where the pointer or the entry is not there."""
    try:
        entry = folder / pointer.read_text()
        notes = json.loads((entry / "notes.json").read_text())
        # Copy-on-write maps: ranks share the page cache, and nobody can change the file by mistake.
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="c") for name in ARRAYS}
    except (OSError, ValueError):
        return None
    return CacheEntry(**arrays, notes=notes)


def build_entry(folder: Path, key: str, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build in a temporary folder and rename, so that an entry is whole from the moment that it can be seen."""
    for left in folder.glob(".building-*"):  # of a build that was killed; the lock says that none is running
        shutil.rmtree(left, ignore_errors=True)
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
    """Return a digest of every file's place in its split, label and content."""
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
    """Yield (path, `train/` or `test/` and path inside the split, label) for every file."""
    for split, listing in zip(("train", "test"), listings, strict=True):
        skip = len(str(listing.folder)) + 1
        for path, label in zip(listing.files, listing.labels, strict=True):
            yield path, f"{split}/{str(path)[skip:]}", label


def cache_folder(asked: Path | None) -> Path:
    """Return a folder for the cache that can be written: the one asked for, the user's, or a private one in /tmp.

    Raises `UserError` where none can be.
    """
    if asked is not None:
        candidates = [asked]
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
        if asked is not None or folder.stat().st_uid == os.getuid():
            return folder
    raise UserError(f"TRAIN_CACHE_DIR={asked or 'unset'}: {candidates[0]} cannot be written; name a folder that can")
