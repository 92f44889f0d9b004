"""Files that are whole or not there: written aside, synced, and renamed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write that takes its name only when the block ends well; raises OSError as `open` does.

    A reader sees the old content or the new, and after a crash nothing of a half-written one but a hidden
    `.name.pid` file.
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


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is whole or not there."""
    with whole_file(path) as file:
        file.write(text.encode())
