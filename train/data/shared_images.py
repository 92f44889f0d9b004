"""Find test images that are training images too: their accuracy says nothing of new images."""

from __future__ import annotations

import filecmp
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from train.data.sources.image_list import ImageList

# So many test images, evenly over all, are looked at.
SAMPLED = 64
# Of larger sets only the image of the same name is compared: asking for each file's size takes long on a network.
MAX_SIZES = 5_000
# Uncompressed files of one shape all have the same size.
MAX_COMPARED = 200


def count_shared(train: ImageList, test: ImageList) -> tuple[int, int]:
    """Return how many of some test images are byte for byte training images, and how many were looked at."""
    rows = range(0, len(test), max(1, -(-len(test) // SAMPLED)))
    if not rows or train.files.shards:
        return 0, 0
    if train.folder == test.folder:  # of lists, where a file may stand in both
        names = [test.files.name(row) for row in rows]
        listed = set(names).intersection(map(train.files.name, range(len(train))))
        return sum(name in listed for name in names), len(rows)
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in paths_of(train) if len(train) <= MAX_SIZES else ():
        with suppress(OSError):
            by_size[path.stat().st_size].append(path)
    return sum(has_copy(path, train, test, by_size) for path in paths_of(test, rows)), len(rows)


def paths_of(listing: ImageList, rows: Iterable[int] | None = None) -> Iterator[Path]:
    """Yield the paths of some files, or of all."""
    for row in range(len(listing)) if rows is None else rows:
        yield Path(str(listing.files[row]))


def has_copy(path: Path, train: ImageList, test: ImageList, by_size: Mapping[int, Sequence[Path]]) -> bool:
    """Return whether a test image has the bytes of the training image of the same name, or of one of the same size."""
    same_name = train.folder.joinpath(*path.relative_to(test.folder.parent).parts[1:])  # an image of val/ too
    try:
        others = [*([same_name] if same_name.exists() else []), *by_size.get(path.stat().st_size, [])[:MAX_COMPARED]]
        return any(filecmp.cmp(path, other, shallow=False) for other in others)
    except OSError:
        return False
