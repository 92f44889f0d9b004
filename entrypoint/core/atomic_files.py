"""Files that are whole or not there: written aside, synced, and renamed; some with a seal that shows any change."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_open(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that takes its name only when the block ends well; raises OSError as `open` does.

    A reader sees the old content or the new, and after a crash nothing of a half-written one but a hidden
    `.name.pid` file (a checkpoint's is removed when the run goes on).
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def atomic_write_text(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with atomic_open(path) as file:
        file.write(text.encode())


def replace_symlink(link: Path, target: str) -> None:
    """Let a symbolic link point to a target, in one step where it is there already; raises OSError."""
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(target)
    aside.replace(link)


CHECKSUM_TRAILER = b"\nsha256 "
SEAL_BYTES = len(CHECKSUM_TRAILER) + 64 + 1


def checksum_trailer(content: bytes | memoryview) -> bytes:
    """Return the line to put behind a content: its SHA-256, by which `unsealed` knows it again."""
    return CHECKSUM_TRAILER + hashlib.sha256(content).hexdigest().encode() + b"\n"


def verify_checksum(data: bytes) -> memoryview:
    """Return what stands before the seal; raises ValueError where that is not what was sealed, or nothing was."""
    content, end = memoryview(data)[:-SEAL_BYTES], data[-SEAL_BYTES:]
    if not end.startswith(CHECKSUM_TRAILER):
        raise ValueError("no checksum at its end: it is cut short, or another program's")
    if checksum_trailer(content) != end:
        raise ValueError("its checksum does not match: it was changed or damaged")
    return content


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
