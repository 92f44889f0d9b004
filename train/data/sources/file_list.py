"""The images of a split in buffers: paths of files, or ranges of bytes in shards."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

from train.data.sources.image_file import ImageFile, Shard, TarMember


class FileList:
    """Images below a folder, without a Python object for each: all are files, or all are members of `shards`.

    Why: objects take several times the memory, and a forked process that reads one writes its reference count. The
    kernel then copies the object's page, so every such process would end up with a copy of all paths.
    """

    def __init__(self, folder: Path) -> None:
        self.prefix = str(folder / "x")[:-1]
        self.names, self.ends = bytearray(), array("q")
        self.shards: list[Shard] = []
        # Of each member: the number of its shard, and where it begins and how long it is (bytes).
        self.numbers, self.offsets, self.sizes = array("q"), array("q"), array("q")

    def append(self, file: ImageFile) -> None:
        """Add an image below the folder; the members of a shard come one after the other."""
        if isinstance(file, TarMember):
            if not self.shards or self.shards[-1] is not file.shard:
                self.shards.append(file.shard)
            self.numbers.append(len(self.shards) - 1)
            self.offsets.append(file.offset)
            self.sizes.append(file.size)
        name = file.name if isinstance(file, TarMember) else str(file)[len(self.prefix) :]
        self.names += name.encode("utf-8", "surrogateescape")
        self.ends.append(len(self.names))

    def name(self, row: int) -> str:
        """Return the path of a file inside the folder, or a member's name in its shard; raises `IndexError`."""
        end = self.ends[row]
        start = self.ends[row - 1] if row else 0
        return self.names[start:end].decode("utf-8", "surrogateescape")

    def relative(self, row: int) -> str:
        """Return the path of a file inside the folder, with the member's name behind that of a shard.

        Raises `IndexError` for a row that is not there.
        """
        return str(self[row])[len(self.prefix) :] if self.shards else self.name(row)

    def __getitem__(self, row: int) -> ImageFile:
        """Return the path of a file, or a member of a shard; raises `IndexError` for a row that is not there."""
        if not self.shards:
            return Path(self.prefix + self.name(row))
        return TarMember(self.shards[self.numbers[row]], self.name(row), self.offsets[row], self.sizes[row])

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.ends)

    def __iter__(self) -> Iterator[ImageFile]:
        """Yield all images in order."""
        return (self[row] for row in range(len(self)))
