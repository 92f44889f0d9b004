"""Atomic file writes: write a temporary file, sync it, and rename it. A checksum trailer detects damage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


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
    return CHECKSUM_TRAILER + hashlib.sha256(content).hexdigest().encode() + b"\n"


def verify_checksum(data: bytes) -> memoryview:
    """Return the content before the trailer; raises ValueError if the checksum is missing or does not match."""
    content, end = memoryview(data)[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not end.startswith(CHECKSUM_TRAILER):
        raise ValueError("no checksum at its end: it is cut short, or another program's")
    if checksum_trailer(content) != end:
        raise ValueError("its checksum does not match: it was changed or damaged")
    return content
