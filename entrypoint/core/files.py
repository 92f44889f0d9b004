"""Files: questions about paths that a user names, and atomic writes.

A name that is too long, a loop or a locked folder is no error here; `pathlib` raises for these until Python 3.13. A
folder that this process works in may have been removed. A file is written under another name, synced, and renamed; a
checksum trailer detects damage.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# More than any list of hosts or plan has.
MAX_TEXT_BYTES = 64 << 20


# Whether a path leads to something, a folder or a regular file that this process can see.
exists = os.path.exists
is_folder = os.path.isdir
is_file = os.path.isfile


def resolve(path: Path) -> Path:
    """Return a path without links; a relative one stays as it is if the working folder was removed."""
    try:
        return Path(os.path.realpath(path))
    except OSError:
        return path


def working_folder() -> Path | None:
    """Return the working folder, or None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def open_regular(path: str | Path, more_flags: int = 0) -> int:
    """Open a regular file to read and return its descriptor; raises OSError.

    A FIFO would block, and a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more_flags)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: str | Path) -> str:
    """Return the text of a regular file, undecodable bytes replaced; raises OSError, also for a very large file."""
    with os.fdopen(open_regular(path), errors="replace") as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a file to write, which is renamed to `path` when the block succeeds; raises OSError.

    A reader sees either the old or the new content. A crash leaves at most a hidden `.name.pid` file. A resumed run
    removes such files of checkpoints.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that gets its name only when the block succeeds; raises OSError as `open` does."""
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with atomic_open(path) as file:
        file.write(text.encode(errors="surrogateescape"))  # a path may have any bytes


def replace_symlink(link: Path, target: str) -> None:
    """Point a symbolic link to a target, replacing an existing link atomically; raises OSError."""
    with atomic_path(link) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)


CHECKSUM_TRAILER = b"\nsha256 "
SEAL_BYTES = len(CHECKSUM_TRAILER) + 64 + 1


def checksum_trailer(content: bytes | memoryview) -> bytes:
    """Return the trailer line with the SHA-256 of a content, which `verify_checksum` checks."""
    import hashlib  # loads OpenSSL, and a start needs none

    return CHECKSUM_TRAILER + hashlib.sha256(content).hexdigest().encode() + b"\n"


def verify_checksum(data: bytes) -> memoryview:
    """Return the content before the trailer; raises ValueError if the checksum is missing or does not match."""
    content, end = memoryview(data)[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not end.startswith(CHECKSUM_TRAILER):
        raise ValueError("no checksum at its end: it is cut short, or another program's")
    if checksum_trailer(content) != end:
        raise ValueError("its checksum does not match: it was changed or damaged")
    return content
