"""Where the bytes of images are: files of their own, or ranges of bytes in tar shards."""

from __future__ import annotations

import os
import stat
import tarfile
import threading
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO, FileIO
from pathlib import Path
from typing import BinaryIO

# Much larger than any photo, and small enough to be read whole.
MAX_FILE_BYTES = 2 << 30
NOT_A_FILE, EMPTY_FILE, TOO_LARGE = "not a regular file", "empty file", "larger than 2 GiB"
CHANGED_SHARD = "the shard was changed since the run began"
# Files and folders that are asked for at once: a network file system answers each question late.
WAITING_AT_ONCE = 8
# What can be wrong with a file that no decoder has seen yet.
FILE_PROBLEMS = frozenset({NOT_A_FILE, EMPTY_FILE, TOO_LARGE, CHANGED_SHARD})


@dataclass(frozen=True, slots=True)
class Shard:
    """A tar file, with the size in bytes and the times (ns) that it had when its headers were read.

    `state` is empty for a tar file.
    """

    path: Path
    size: int
    mtime_ns: int
    ctime_ns: int
    state: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSplit(Shard):
    """A split of a data set that the user's code makes: `path` says which, `state` changes with its content.

    Items are read one after the other, because such code need not be made for threads.
    """

    get: Callable[[int], bytes]
    lock: threading.Lock = field(default_factory=threading.Lock)


# What the parts of a tar file begin at a multiple of (bytes).
BLOCK = 512


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file inside a shard, or an item of a split, whose number `start` is.

    Else `start` is where its content begins (bytes), a multiple of `BLOCK`, plus the number of blocks of its headers.
    That is 0 if they are more than `BLOCK` blocks.
    """

    shard: Shard
    start: int
    size: int

    @property
    def name(self) -> str:
        """The name inside the shard, as its header says; where it is if that cannot be read any more."""
        if isinstance(self.shard, OwnSplit):
            return str(self.start)
        headers = self.start % BLOCK
        offset = self.start - headers
        with suppress(Exception), open_unchanged(self.shard) as file:  # tarfile raises what its parser meets
            file.seek(offset - headers * BLOCK)
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="surrogateescape") as archive:
                return next(iter(archive)).name
        return f"byte {offset:,}"

    def __str__(self) -> str:
        """Return the path of the shard and the name inside it."""
        return f"{self.shard.path}:{self.name}"


ImageFile = Path | TarMember


def check_size(size: int) -> int:
    """Return a size in bytes; raises `OSError` for one that no image has, such as the 0 of files below /proc."""
    if not size:
        raise OSError(EMPTY_FILE)
    if size > MAX_FILE_BYTES:
        raise OSError(TOO_LARGE)
    return size


def open_image(file: ImageFile) -> BytesIO | FileIO:
    """Open an image; raises `OSError` for anything but a regular file that has a sensible size.

    The file system is asked once by name, as each question takes long on a network.
    """
    if isinstance(file, TarMember):  # only regular members are listed
        check_size(file.size)
        return BytesIO(read_member(file))
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for ever
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(NOT_A_FILE)
        check_size(status.st_size)
    except OSError:
        os.close(descriptor)
        raise
    return FileIO(descriptor)


def read_file(file: ImageFile) -> bytes:
    """Return an image's content; raises `OSError` for what `open_image` refuses."""
    with open_image(file) as opened:
        return opened.read()


def read_member(member: TarMember) -> bytes:
    """Return the bytes of a member; raises `OSError` if the shard is not what it was: they would be another image's."""
    shard = member.shard
    if isinstance(shard, OwnSplit):
        with shard.lock:
            return shard.get(member.start)
    with open_unchanged(shard) as file:
        file.seek(member.start - member.start % BLOCK)
        data = file.read(member.size)
    if len(data) != member.size:
        raise OSError(CHANGED_SHARD)
    return data


def open_unchanged(shard: Shard) -> BinaryIO:
    """Open a shard; raises `OSError` if it is not what it was."""
    file = os.fdopen(os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")
    status = os.fstat(file.fileno())
    if (status.st_size, status.st_mtime_ns) != (shard.size, shard.mtime_ns):
        file.close()
        raise OSError(CHANGED_SHARD)
    return file


# Whatever is larger is too large for an image.
MAX_SIZE = 2**32 - 1


class FileList(Sequence[ImageFile]):
    """Images below a folder, without a Python object for each: all are files, or all are members of `shards`.

    Why: objects take several times the memory, in each rank. Members have no names here, and take 16 bytes each.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = str(folder / "x")[:-1]
        self.names, self.ends = bytearray(), array("q")
        self.shards: list[Shard] = []
        # Of each member: the number of its shard, its `start`, and how long it is (bytes, at most `MAX_SIZE`).
        self.numbers, self.starts, self.sizes = array("I"), array("q"), array("I")

    def append(self, file: str | ImageFile) -> None:
        """Add an image below the folder, a file by its path; the members of a shard come one after the other."""
        if isinstance(file, TarMember):
            if not self.shards or self.shards[-1] is not file.shard:
                self.shards.append(file.shard)
            self.numbers.append(len(self.shards) - 1)
            self.starts.append(file.start)
            self.sizes.append(min(file.size, MAX_SIZE))
            return
        self.names += str(file)[len(self.prefix) :].encode("utf-8", "surrogateescape")
        self.ends.append(len(self.names))

    def extend(self, others: FileList) -> None:
        """Add the files of another list of this folder, or of another shard."""
        first, shards = len(self.names), len(self.shards)
        self.names += others.names
        self.ends.extend(first + end for end in others.ends)
        self.shards += others.shards
        self.numbers.extend(array("I", (shards + number for number in others.numbers)))
        self.starts.extend(others.starts)
        self.sizes.extend(others.sizes)

    def name(self, row: int) -> str:
        """Return the path of a file inside the folder; raises `IndexError`."""
        end = self.ends[row]
        start = self.ends[row - 1] if row else 0
        return self.names[start:end].decode("utf-8", "surrogateescape")

    def relative(self, row: int) -> str:
        """Return the path of a file inside the folder, with the member's name, which is read, behind that of a shard.

        Raises `IndexError` for a row that is not there.
        """
        return str(self[row])[len(self.prefix) :]

    def __getitem__(self, row: int) -> ImageFile:  # type: ignore[override]
        """Return the path of a file, or a member of a shard; raises `IndexError` for a row that is not there."""
        if not self.shards:
            return Path(self.prefix + self.name(row))
        return TarMember(self.shards[self.numbers[row]], self.starts[row], self.sizes[row])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.numbers or self.ends)
