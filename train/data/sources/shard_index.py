"""Where the images of shards are, kept in the cache folder, so that the headers are read once."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from entrypoint.core.atomic_files import atomic_open, checksum_trailer, verify_checksum
from entrypoint.core.console import log
from entrypoint.core.errors import UserError, first_line, one_line
from train.checkpoint.metadata import read_bytes
from train.data.cache_folder import cache_folder
from train.data.sources.image_file import FileList, Shard, TarMember
from train.data.sources.tar_headers import read_shard
from train.lock_file import folder_lock

# Part of every index. Increase it when what is read from headers changes.
VERSION = 1
# Shards whose headers are read at once: a network file system answers each question late.
THREADS = 8
# Fewer bytes are read so soon that nobody waits.
LARGE_BYTES = 1 << 30


class SavedIndex(msgspec.Struct, frozen=True, kw_only=True):
    """An index as it is in the cache; `states` has size, modification and change time (ns) of each shard.

    The buffers are those of `FileList`, 64-bit integers but for `names`. `labels` are as in the shards.
    """

    version: int
    states: tuple[tuple[int, int, int], ...]
    names: bytes
    ends: bytes
    numbers: bytes
    offsets: bytes
    sizes: bytes
    labels: bytes


BUFFERS = ("ends", "numbers", "offsets", "sizes")
Index = tuple[FileList, "array[int]"]


def load_index(folder: Path, shards: Sequence[Path], configured: Path | None) -> Index:
    """Return images and labels of some shards below a folder, from the cache if the shards are as they were.

    `configured` is TRAIN_CACHE_DIR. Raises `UserError`, and `OSError` for a shard that cannot be read.
    """
    cached = index_folder(configured)
    if cached is None:
        return build_index(folder, shards)
    place = cached / f"{index_name(shards)}.shards"
    if found := read_index(place, folder, shards):
        return found
    with folder_lock(cached / "indexing.lock", f"another process that reads shards for {cached}"):
        if found := read_index(place, folder, shards):
            return found
        built = build_index(folder, shards)
        write_index(place, built, named=configured is not None)
    return built


def index_folder(configured: Path | None) -> Path | None:
    """Return the cache folder, None if the user named none and none can be written; raises `UserError`."""
    try:
        return cache_folder(configured)
    except UserError:
        if configured:
            raise
        return None


def index_name(shards: Sequence[Path]) -> str:
    """Return a name for the index of the shards at these paths."""
    digest = hashlib.blake2b(digest_size=16)
    for path in shards:
        digest.update(f"{path.absolute()}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def shard_state(path: Path) -> Shard:
    """Return a shard as it is now; raises `OSError`."""
    status = path.stat()
    return Shard(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def build_index(folder: Path, shards: Sequence[Path]) -> Index:
    """Read the headers of all shards; raises `UserError` or `OSError` for the first one that cannot be used."""
    total = sum(shard_state(path).size for path in shards)
    if total >= LARGE_BYTES:
        log(f"reading the headers of {len(shards):,} shards, {total / 2**30:,.1f} GiB, in {one_line(folder)}")
    files, labels = FileList(folder), array("q")
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for shard, images in pool.map(read_shard, shards):
                for image, label in images:
                    files.append(TarMember(shard, *image))
                    labels.append(label)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return files, labels


def write_index(place: Path, index: Index, *, named: bool) -> None:
    """Write an index for the next reader; raises `UserError` if the folder that the user named cannot be written."""
    files, labels = index
    content = msgspec.msgpack.encode(
        SavedIndex(
            version=VERSION,
            states=tuple((one.size, one.mtime_ns, one.ctime_ns) for one in files.shards),
            names=bytes(files.names),
            labels=labels.tobytes(),
            **{name: getattr(files, name).tobytes() for name in BUFFERS},
        )
    )
    try:
        with atomic_open(place) as file:
            file.write(content)
            file.write(checksum_trailer(content))
    except OSError as error:
        if named:
            raise UserError(f"TRAIN_CACHE_DIR={place.parents[1]}: cannot be written ({error.strerror})") from None


def read_index(place: Path, folder: Path, shards: Sequence[Path]) -> Index | None:
    """Return an index, None if there is none of the shards as they are; raises `OSError` for a shard."""
    try:
        content = verify_checksum(read_bytes(place))
        saved = msgspec.msgpack.decode(content, type=SavedIndex)
        now = [shard_state(path) for path in shards]
        if saved.version != VERSION or saved.states != tuple((one.size, one.mtime_ns, one.ctime_ns) for one in now):
            return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        log(f"{place}: the index of shards is damaged ({first_line(error)}), and is made again")
        return None
    files = FileList(folder)
    files.shards, files.names = now, bytearray(saved.names)
    for name in BUFFERS:
        getattr(files, name).frombytes(getattr(saved, name))
    labels = array("q")
    labels.frombytes(saved.labels)
    return files, labels
