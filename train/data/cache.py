"""Decoded images on disk, keyed by content, written atomically, verified when opened, shared by ranks and jobs."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import msgspec

from entrypoint.core.atomic_files import atomic_write_text, checksum_trailer
from entrypoint.core.console import log
from entrypoint.core.errors import UserError
from entrypoint.core.user_dirs import PRIVATE, user_cache_dir
from train.checkpoint.metadata import read_bytes
from train.data.cache_entry import (
    ARRAYS,
    NOTES_FILE,
    CacheEntry,
    DamagedEntry,
    ImageSource,
    Notes,
    block_checksums,
    open_entry,
)
from train.data.cache_owner import others_can_write, owner_name, why_not_trusted
from train.data.fingerprint import digest_of_file, iter_files
from train.data.image_file import TarMember
from train.lock_file import folder_lock

KEY = re.compile(r"[0-9a-f]{32}", re.ASCII)


log_once = cache(log)


@dataclass(frozen=True)
class CacheFolder:
    """The folder for decoded images, and whether the user named it: only there are entries of other users read."""

    path: Path
    is_named: bool

    @property
    def own_files(self) -> Path:
        """Folder for what this user alone needs: other users can neither write nor remove it."""
        return self.path / f"known-{os.getuid()}"


def load_or_build(source: ImageSource, folder: CacheFolder, build: Callable[[Path], dict[str, Any]]) -> CacheEntry:
    """Return the entry of these files; it is built first if the cache has none, or a damaged one.

    `build` writes the four arrays into a folder and returns the notes. Only one process runs it at a time; others wait.
    The key is a digest of the content of all files, but reading all files is as slow as decoding them.
    So a second key, of each file's size and times, refers to the first one while no file changes.
    The times include the change time, which no program can set.
    """
    check_own_files(folder)
    pointer = folder.own_files / metadata_key(source)
    if entry := find_entry(source, folder, read_pointer(pointer)):
        return entry
    try:
        folder.own_files.mkdir(mode=0o700, exist_ok=True)
        lock = folder_lock(
            folder.own_files / "building.lock", f"another process that decodes images into {folder.path}"
        )
        with lock:
            if entry := find_entry(source, folder, read_pointer(pointer)):
                return entry
            key = content_key(source)
            entry = find_entry(source, folder, key)
            if entry is None:
                build_entry(folder, key, build)
                entry = find_entry(source, folder, key)
            atomic_write_text(pointer, key)
    except OSError as error:
        raise UserError(
            f"{folder.path}: the image cache cannot be written ({error.strerror or error}); set TRAIN_CACHE_DIR"
        ) from None
    if entry is None:
        raise UserError(f"{folder.path}: the image cache cannot be read back; set TRAIN_CACHE_DIR to another folder")
    return entry


def check_own_files(folder: CacheFolder) -> None:
    """Raise `UserError` if another user could change which entry this user finds."""
    path = folder.own_files
    if path.is_symlink() or (path.exists() and (path.stat().st_uid != os.getuid() or others_can_write(path))):
        raise UserError(
            f"TRAIN_CACHE_DIR={folder.path}: another user owns {path.name} or can write it. Remove it or name another"
            " folder."
        )


def read_pointer(pointer: Path) -> str:
    """Return the key that a pointer holds, empty if it cannot be read."""
    try:
        text = read_bytes(pointer, 100).decode()
    except (OSError, ValueError):
        return ""
    return text if KEY.fullmatch(text) else ""


def entry_paths(folder: CacheFolder, key: str) -> tuple[Path, Path]:
    """Return where the entry of a key may be: under the key, or under this user's name for it.

    The second is for a user who finds an entry of somebody else under the key that cannot be used.
    """
    return folder.path / key, folder.path / f"{key}.{os.getuid()}"


def find_entry(source: ImageSource, folder: CacheFolder, key: str) -> CacheEntry | None:
    """Return the entry of a key, None if there is none that can be used; removes a damaged one of this user."""
    for path in entry_paths(folder, key) if key else ():
        if not path.is_dir():
            continue
        if reason := why_not_trusted(path, folder.is_named):
            log_once(f"{path}: decoded images of user {owner_name(path)} are not used: {reason}")
            continue
        try:
            entry = open_entry(source, path, key)
        except DamagedEntry as error:
            log(f"{path}: decoded images are damaged ({error}), and are decoded again")
            if path.stat().st_uid == os.getuid():
                shutil.rmtree(path)
            continue
        except FileNotFoundError:  # another process of this user found it damaged first
            continue
        if path.stat().st_uid != os.getuid():
            log(f"{path}: using decoded images of user {owner_name(path)}")
        return entry
    return None


def build_entry(folder: CacheFolder, key: str, build: Callable[[Path], dict[str, Any]]) -> None:
    """Build in a temporary folder, then rename it, so that a visible entry is always complete; raises OSError.

    Other users can read it. Its owner alone can write it.
    """
    for leftover in folder.own_files.glob("building-*"):  # of a killed build; the lock excludes a running one
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
    temp_dir = Path(tempfile.mkdtemp(prefix="building-", dir=folder.own_files))
    try:
        skipped = build(temp_dir)["skipped"]
        checksums = {name: block_checksums(temp_dir / f"{name}.npy") for name in ARRAYS}
        text = msgspec.json.encode(Notes(skipped=tuple(map(tuple, skipped)), checksums=checksums))
        (temp_dir / NOTES_FILE).write_bytes(text + checksum_trailer(text))
        for path in temp_dir.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
            path.chmod(0o644)
        temp_dir.chmod(0o755)
        usual, own = entry_paths(folder, key)
        if own.exists():
            shutil.rmtree(own)
        temp_dir.rename(own if usual.exists() else usual)
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
            state = f"{state_of(file.shard.path)}\0{file.offset}\0{file.size}"
        else:
            state = state_on_disk(source.policy, file)
        digest.update(f"{file.parent}\0{relative}\0{label}\0{state}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def state_on_disk(policy: str, path: Path) -> str:
    """Return a file's size, inode and times, with the policy `skip` also whether this user can read it."""
    try:
        stat = path.stat()
    except OSError as error:  # decoding names it
        return f"unreadable {error.errno}"
    denied = policy == "skip" and not os.access(path, os.R_OK)
    state = f"{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    return f"{state}\0no permission" if denied else state


def content_key(source: ImageSource) -> str:
    """Return a digest of every file's path inside its split, label and content."""
    digest = hashlib.blake2b(source.settings.encode(), digest_size=16)
    for path, relative, label in iter_files(source.listings):
        content = digest_of_file(path)
        digest.update(f"{relative}\0{label}\0{content}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def cache_folder(configured: Path | None) -> CacheFolder:
    """Return a writable folder for the cache: the configured one, the user's, or a private one in /tmp.

    Raises `UserError` if none is writable.
    """
    if configured is not None:
        candidates = [configured]
    else:
        own = user_cache_dir(os.environ)
        candidates = [own] if own else []
        with suppress(OSError):  # no temporary folder can be written to
            candidates.append(Path(tempfile.gettempdir(), PRIVATE.format(os.getuid())))
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        if configured is not None or folder.stat().st_uid == os.getuid():
            return CacheFolder(folder, configured is not None)
    tried = candidates[0] if candidates else "no folder"
    raise UserError(f"TRAIN_CACHE_DIR={configured or 'unset'}: {tried} cannot be written; name a folder that can")
