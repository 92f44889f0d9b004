"""Find test images that are training images too: their accuracy says nothing of new images."""

from __future__ import annotations

import filecmp
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from train.data.sources.image_folder import ImageList

# So many test images, evenly over all, are looked at.
SAMPLED = 64
# Of larger sets only the image of the same name is compared: asking for each file's size takes long on a network.
MAX_SIZES = 5_000
# Uncompressed files of one shape all have the same size.
MAX_COMPARED = 200


def count_shared(train: ImageList, test: ImageList) -> tuple[int, int]:
    """Return how many of some test images are byte for byte training images, and how many were looked at."""
    rows = range(0, len(test), max(1, -(-len(test) // SAMPLED)))
    paths = [path for row in rows if isinstance(path := test.files[row], Path)]
    if not paths or train.files.shards:
        return 0, 0
    if train.folder == test.folder:  # of lists, where a file may stand in both
        names = [test.files.name(row) for row in rows]
        listed = set(names).intersection(map(train.files.name, range(len(train))))
        return sum(name in listed for name in names), len(paths)
    sizes = sizes_of(train) if len(train) <= MAX_SIZES else {}
    shared = sum(any(is_same(path, other) for other in candidates(path, train, test, sizes)) for path in paths)
    return shared, len(paths)


def sizes_of(train: ImageList) -> dict[int, list[int]]:
    """Return the rows of the training images by the size of their files."""
    rows: dict[int, list[int]] = defaultdict(list)
    for row in range(len(train)):
        with suppress(OSError):
            rows[os.stat(str(train.files[row])).st_size].append(row)  # noqa: PTH116  # Path.stat is slower
    return rows


def candidates(path: Path, train: ImageList, test: ImageList, sizes: dict[int, list[int]]) -> Iterator[Path]:
    """Yield the training images that this one may be a copy of, that of the same name first."""
    with suppress(ValueError):
        yield train.folder / path.relative_to(test.folder)
    with suppress(OSError):
        for row in sizes.get(path.stat().st_size, [])[:MAX_COMPARED]:
            yield Path(str(train.files[row]))


def is_same(path: Path, other: Path) -> bool:
    """Return whether two files have the same bytes."""
    try:
        return filecmp.cmp(path, other, shallow=False)
    except OSError:
        return False
