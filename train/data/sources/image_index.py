"""Where the images of shards and of large folders are, kept in the user's cache folder, so that these are read once."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, first_line
from entrypoint.core.files import atomic_open, checksum_trailer, verify_checksum
from train.checkpoint.metadata import read_bytes
from train.data.cache_folder import cache_folder
from train.data.sources.image_file import WAITING_AT_ONCE, FileList, Shard

# Part of every index. Increase it when what is read of shards or folders changes.
VERSION = 3


class SavedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index as it is in the cache; `states` has size, modification and change time (ns) of each place.

    The buffers are those of `FileList`. `labels` are 64-bit integers, as in the shards.
    """

    version: int
    places: tuple[bytes, ...]
    states: tuple[tuple[int, int, int], ...]
    names: memoryview
    ends: memoryview
    numbers: memoryview
    starts: memoryview
    sizes: memoryview
    labels: memoryview
    rows: tuple[tuple[str | float, ...], ...] = ()


BUFFERS = ("ends", "numbers", "starts", "sizes")


@dataclass(frozen=True)
class Index:
    """Images with their labels, and the places that they are in: shards, or each folder with its state.

    Without places it is not kept. Labels are numbers of `rows` where these are: names of classes, or numbers.
    """

    files: FileList
    labels: array[int]
    places: tuple[Shard, ...] = ()
    rows: tuple[tuple[str | float, ...], ...] = ()


def load_index(
    folder: Path, paths: Sequence[Path], configured: Path | None, build: Callable[[], Index], kind: str = ""
) -> Index:
    """Return the images at some paths below a folder, from the cache if their places are as they were.

    `kind` says what else `build` depends on. `configured` is TRAIN_CACHE_DIR; without it the index is not kept where no
    cache folder can be written. Processes that ask at once build one index. Raises what `build` raises, and `UserError`
    for a folder that the user named.
    """
    try:
        cached = cache_folder(configured)
    except UserError:
        if configured:
            raise
        return build()
    name = hashlib.blake2b(b"\0".join(os.fsencode(path.absolute()) for path in paths), digest_size=16).hexdigest()
    place = cached / f"{name}{kind}.index"
    if found := read_index(place, folder):
        return found
    from train.lock_file import folder_lock  # its import is slow, and plans of small folders need none

    with folder_lock(cached / "indexing.lock", f"another process that lists images for {cached}"):
        if found := read_index(place, folder):
            return found
        built = build()
        if built.places:
            write_index(place, built, named=configured is not None)
    return built


def state_of(path: Path) -> Shard:
    """Return a shard or a folder as it is now; raises `OSError`."""
    status = path.stat()
    return Shard(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def write_index(place: Path, index: Index, *, named: bool) -> None:
    """Write an index for the next reader; raises `UserError` if the folder that the user named cannot be written."""
    files = index.files
    content = msgspec.msgpack.encode(
        SavedIndex(
            version=VERSION,
            places=tuple(os.fsencode(one.path) for one in index.places),
            states=tuple((one.size, one.mtime_ns, one.ctime_ns) for one in index.places),
            names=memoryview(files.names),
            labels=memoryview(index.labels),
            rows=index.rows,
            **{name: memoryview(getattr(files, name)) for name in BUFFERS},
        )
    )
    try:
        with atomic_open(place) as file:
            file.write(content)
            file.write(checksum_trailer(content))
    except OSError as error:
        if named:
            raise UserError(f"TRAIN_CACHE_DIR={place.parents[1]}: cannot be written ({error.strerror})") from None


def read_index(place: Path, folder: Path) -> Index | None:
    """Return an index, None if there is none of the places as they are."""
    from concurrent.futures import ThreadPoolExecutor

    try:
        saved = msgspec.msgpack.decode(verify_checksum(read_bytes(place)), type=SavedIndex)
        if saved.version != VERSION:
            return None
        with ThreadPoolExecutor(WAITING_AT_ONCE) as pool:
            now = list(pool.map(state_of, (Path(os.fsdecode(path)) for path in saved.places)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log(f"{place}: the index of images is damaged ({first_line(error)}), and is made again")
        return None
    if saved.states != tuple((one.size, one.mtime_ns, one.ctime_ns) for one in now):
        return None
    files, labels = FileList(folder), array("q")
    files.names = bytearray(saved.names)
    if saved.numbers:
        files.shards = now
    for name in BUFFERS:
        getattr(files, name).frombytes(getattr(saved, name))
    labels.frombytes(saved.labels)
    return Index(files, labels, tuple(now), saved.rows)
