"""Lists of images with their labels: split and joined, with errors that name entries, and images in both splits."""

from __future__ import annotations

import filecmp
import hashlib
import os
import unicodedata
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from entrypoint.core.errors import UserError, one_line, printable
from train.data.sources.image_file import FileList, ImageFile
from train.data.sources.targets import Targets
from train.setting_groups.data import IGNORED_FOLDERS

# Share of a class for the test, and as much for the choice of a checkpoint, where a folder has no such splits.
CUT_SHARE, MIN_CUT_IMAGES = 0.1, 3


# What people call the parts of a data set, in any case.
SPLIT_OF = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "val"),
}


def split_places(data_dir: Path, ending: str = "") -> dict[str, Path]:
    """Return the folder of each split, or its file with this ending, by a usual name; raises OSError.

    Another name than train, test and val counts next to that of the training images alone, and a folder's if it has
    subfolders: a class may be called `valid`. Raises `UserError` for two names of one split.
    """
    places: dict[str, Path] = {}
    for name in sorted(os.listdir(data_dir)):
        plain = name.lower()
        split = SPLIT_OF.get(plain.removesuffix(ending), "") if plain.endswith(ending) else ""
        if not split or (not ending and name != split and not has_classes(data_dir / name)):
            continue
        if split in places:
            raise UserError(
                f"TRAIN_DATA_DIR={printable(data_dir)}: {printable(places[split].name)} and {printable(name)} may both"
                f" be the {split} images. Keep one of the two."
            )
        places[split] = data_dir / name
    if "train" in places:
        return places
    return {split: path for split, path in places.items() if path.name == f"{split}{ending}"}


def has_classes(folder: Path) -> bool:
    """Return whether a split has class folders; ImageNet's test images are in none, as their classes are secret."""
    try:
        return bool(class_folders(folder))
    except OSError:
        return False


def class_folders(folder: Path) -> tuple[str, ...]:
    """Return the names of the subfolders that are classes, in order; raises OSError."""
    names = sorted(entry.name for entry in os.scandir(folder) if is_folder(entry))
    return tuple(name for name in names if not name.startswith(".") and name not in IGNORED_FOLDERS)


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder's entry is a folder, or a link to one that exists."""
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


@dataclass(frozen=True)
class UnreadableImage:
    """A file or folder of a class that cannot be used, and the reason."""

    path: ImageFile
    reason: str

    def __str__(self) -> str:
        """Return the path and the reason."""
        return f"{one_line(self.path)}: {one_line(self.reason)}"


@dataclass(frozen=True)
class ImageList:
    """One split: each file with the number of its class, and the entries that cannot be used.

    It `is_cut` if the folder had no splits.
    With both test/ and val/, the test split has the files of test/ and then, from row `val_start` on, those of val/.

    With `targets` the labels are numbers of their rows, and `classes` the model's outputs.
    Files and labels are in buffers, without an object for each (see `FileList`).
    """

    folder: Path
    classes: tuple[str, ...]
    files: FileList
    labels: array[int]
    unreadable: tuple[UnreadableImage, ...] = ()
    val_start: int | None = None
    is_cut: bool = False
    targets: Targets | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)


def unreadable_image_error(bad: list[UnreadableImage]) -> UserError:
    """Return the error of one line for images that cannot be read."""
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return UserError(f"{bad[0]}{more}; repair or remove it, or set TRAIN_ON_UNREADABLE_IMAGE=skip")


def empty_class_error(folder: Path, name: str, unreadable: Sequence[UnreadableImage]) -> UserError:
    """Return the error for a class without an image that can be read, with its unreadable entries."""
    is_folder = (folder / name).is_dir()
    what = f"{one_line(folder / name)}: the class" if is_folder else f"{one_line(folder)}: class {printable(name)}"
    if not unreadable:
        return UserError(f"{what} has no images; add some or remove the folder")
    count = f"{len(unreadable):,} cannot, first {unreadable[0]}"
    return UserError(f"{what} has no images that can be read; {count}. Repair them or remove the class.")


def check_classes(listing: ImageList, readable: Collection[int], bad: Mapping[int, UnreadableImage]) -> None:
    """Raise `UserError` for the first class whose number is not among the `readable` ones.

    `bad` are the images of the split that could not be read, by row.
    """
    for label, name in enumerate(() if listing.targets else listing.classes):
        if label not in readable:
            folder = listing.folder / name
            found = [
                one for one in listing.unreadable if isinstance(one.path, Path) and one.path.is_relative_to(folder)
            ]
            found += [one for row, one in bad.items() if listing.labels[row] == label]
            raise empty_class_error(listing.folder, name, found)


def cut_listing(whole: ImageList, *, cuts_val: bool) -> tuple[ImageList, ImageList]:
    """Return the images to train on, and those of the test with those of the choice behind them.

    A digest of each file's path in the folder decides, so the same file is on the same side on every node, in a resumed
    run and after others were added, but for some at the border. Raises `UserError` for a class with too few images.
    """
    parts: dict[str, list[int]] = {"train": [], "test": [], "val": []}
    classes = ("",) if whole.targets else whole.classes  # labels of targets are numbers of rows
    rows_of: list[list[int]] = [[] for _ in classes]
    for row, label in enumerate(whole.labels):
        rows_of[0 if whole.targets else label].append(row)

    def digest(row: int) -> bytes:
        return hashlib.blake2b(os.fsencode(whole.files.relative(row)), digest_size=8).digest()

    for name, unordered in zip(classes, rows_of, strict=True):
        rows = sorted(unordered, key=digest)
        if len(rows) < MIN_CUT_IMAGES:
            raise UserError(
                f"{one_line(whole.folder / name)}: has {len(rows)} images, and without test/ a folder is split in"
                " three. Add some, or make train/ and test/."
            )
        count = max(1, round(CUT_SHARE * len(rows)))
        kept = 2 * count if cuts_val else count
        for part, some in (("test", rows[:count]), ("val", rows[count:kept]), ("train", rows[kept:])):
            parts[part] += some
    chosen = {part: take_rows(whole, sorted(rows)) for part, rows in parts.items()}
    test = chosen["test"]
    if cuts_val:
        test = append_split(test, chosen["val"], whole.folder)
    return replace(chosen["train"], unreadable=whole.unreadable), replace(test, is_cut=True)


def take_rows(listing: ImageList, rows: Sequence[int]) -> ImageList:
    """Return some images of a list."""
    files = FileList(listing.folder)
    for row in rows:
        files.append(f"{listing.files.prefix}{listing.files.name(row)}")
    return replace(listing, files=files, labels=array("q", (listing.labels[row] for row in rows)), unreadable=())


def append_split(test: ImageList, val: ImageList, folder: Path) -> ImageList:
    """Return the files of test/ and then those of val/, both below `folder`, as one list."""
    files = FileList(folder)
    for path in chain(test.files, val.files):
        files.append(path)
    unreadable = (*test.unreadable, *val.unreadable)
    return replace(test, files=files, labels=test.labels + val.labels, unreadable=unreadable, val_start=len(test))


def find_alike(name: str, others: Iterable[str]) -> str:
    """Return how a name differs from another one that looks the same, empty where none does."""
    for other in others:
        if other != name and plain_name(other) == plain_name(name):
            return f" ({printable(ascii(name))} and {printable(ascii(other))} look alike but are two names)"
    return ""


def plain_name(name: str) -> str:
    """Return a name without what nobody sees: its Unicode form, capitals, blanks around it."""
    return unicodedata.normalize("NFC", name).strip().casefold()


def check_same_classes(data_dir: Path, splits: Mapping[str, tuple[str, ...]]) -> None:
    """Raise `UserError` if a split, or a list, has other classes than the first one."""
    first, *others = splits
    for other in others:
        differ = []
        for name, another in ((first, other), (other, first)):
            only = sorted(set(splits[name]) - set(splits[another]))
            if only:
                listed = ", ".join(map(printable, only[:5]))
                differ.append(f"only in {name}: {listed}{find_alike(only[0], splits[another])}")
        if differ:
            raise UserError(
                f"TRAIN_DATA_DIR={printable(data_dir)}: classes differ, {'; '.join(differ)}; both need the same ones"
            )


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
