"""The paths of many files in two buffers."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path


class FileList:
    """Paths of files below a folder, without a Python object for each.

    Why: objects take several times the memory, and a forked process that reads one writes its reference count. The
    kernel then copies the object's page, so every such process would end up with a copy of all paths.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = str(folder / "x")[:-1]
        self.names, self.ends = bytearray(), array("q")

    def append(self, path: Path) -> None:
        """Add a file below the folder."""
        self.names += str(path)[len(self.prefix) :].encode("utf-8", "surrogateescape")
        self.ends.append(len(self.names))

    def relative(self, row: int) -> str:
        """Return the path of a file inside the folder; raises `IndexError` for a row that is not there."""
        end = self.ends[row]
        start = self.ends[row - 1] if row else 0
        return self.names[start:end].decode("utf-8", "surrogateescape")

    def __getitem__(self, row: int) -> Path:
        """Return the path of a file; raises `IndexError` for a row that is not there."""
        return Path(self.prefix + self.relative(row))

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.ends)

    def __iter__(self) -> Iterator[Path]:
        """Yield all paths in order."""
        return (self[row] for row in range(len(self)))
