"""List the classes and files of an image folder; raises errors that name unusable entries."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, one_line, printable
from entrypoint.core.files import exists, resolve
from train.data.sources.image_file import WAITING_AT_ONCE, FileList, Shard
from train.data.sources.image_index import Index, load_index, state_of
from train.data.sources.image_list import (
    ImageList,
    UnreadableImage,
    append_split,
    check_same_classes,
    class_folders,
    cut_listing,
    empty_class_error,
    has_classes,
    is_folder,
    split_places,
    unreadable_image_error,
)
from train.setting_groups.data import IGNORED_FOLDERS

# What file managers leave behind; hidden files are passed over as well.
IGNORED = IGNORED_FOLDERS | {"Thumbs.db", "desktop.ini"}


@contextmanager
def translate_folder_errors(data_dir: Path) -> Iterator[None]:
    """Convert an OSError about a folder of the data set into a `UserError` that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: {printable(error.filename or data_dir)} cannot be read"
            f" ({error.strerror}); check its permissions"
        ) from None


def split_folders(data_dir: Path, *, only_test: bool = False) -> tuple[Path, Path, Path | None]:
    """Return the folders of train and test (or val), and of val next to test; raises `UserError` where one is missing.

    With `only_test`, both are the folder to evaluate: test/, val/, or the folder itself if its subfolders are classes.
    """
    places = split_places(data_dir)
    tests = [places[name] for name in ("test", "val") if name in places and places[name].is_dir()]
    test = next(filter(has_classes, tests), None) or next(iter(tests), None)
    if only_test:
        return test or data_dir, test or data_dir, None
    if test is None and (whole := whole_folder(data_dir)):
        return whole, whole, None
    if "train" not in places or not places["train"].is_dir() or test is None:
        needs = "train/ and test/ (or val/), or a folder for each class, or a list of its files in train.csv"
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {what_is_there(data_dir)}; it needs {needs}")
    val = places.get("val") if test == places.get("test") else None
    return places["train"], test, val if val and has_classes(val) else None  # else it is without images


def what_is_there(data_dir: Path) -> str:
    """Return what a folder without the data that it needs holds, for the error that names it."""
    found = sorted(printable(entry.name) for entry in os.scandir(data_dir))[:5]
    return f"holds {', '.join(found)}" if found else "is empty"


def whole_folder(data_dir: Path) -> Path | None:
    """Return the folder whose classes have to be split: train/ alone, or the folder of classes itself."""
    places = {split: path for split, path in split_places(data_dir).items() if path.is_dir()}
    if "train" in places:
        return places["train"] if has_classes(places["train"]) else None
    return data_dir if not places and len(class_folders(data_dir)) > 1 else None


def class_names(folder: Path) -> tuple[str, ...]:
    """Return a split's classes, its subfolders in order of name.

    Raises `UserError` where there are none, or where one is a link to a folder above it.
    """
    names = class_folders(folder)
    if not names:
        raise UserError(f"{one_line(folder)}: no class folders; each class is a subfolder with its images")
    for entry in os.scandir(folder):
        if entry.name in names and leads_up(entry):
            raise UserError(f"{UnreadableImage(Path(entry.path), LINK_UPWARD)}; remove it")
    return names


LINK_UPWARD = "a link to a folder above it"


def split_classes(data_dir: Path, *, only_test: bool = False) -> tuple[Path, Path, Path | None, tuple[str, ...]]:
    """Return the folders of train, test and val, if any, and their classes; raises `UserError` where these differ."""
    train, test, val = split_folders(data_dir, only_test=only_test)
    splits = {f"{folder.name}/": class_names(folder) for folder in (train, test, val) if folder}
    check_same_classes(data_dir, splits)
    return train, test, val, splits[f"{train.name}/"]


def why_no_file(entry: os.DirEntry[str]) -> str:
    """Return why a folder's entry is no regular file, nor a link to one; empty if it is.

    Asks the file system for links only; the folder itself says what the other entries are.
    """
    try:
        if entry.is_file():
            return ""
    except OSError as error:  # a link to itself
        return error.strerror or "cannot be opened"
    if entry.is_symlink() and not Path(entry.path).exists():
        return "a link to a file that is not there"
    return "not a regular file"


def leads_up(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder is a link to one above it, along its path or along its links."""
    if not entry.is_symlink():  # nearly all: resolving each would ask a network file system for every class
        return False
    path = Path(entry.path)
    return any(
        exists(above) and path.samefile(above)
        for above in chain(path.absolute().parents, (resolve(path.parent) / path.name).parents)
    )


def scan_class(folder: Path, places: list[Shard] | None = None) -> Iterator[str | UnreadableImage]:
    """Yield the paths of one class's files, then of those in its subfolders, however deep; hidden ones are passed over.

    Links are followed. A folder that cannot be listed, and a link to a folder above it, come as `UnreadableImage`.
    The folders that are listed are added to `places`, each as it was before.
    """
    ahead = [folder]
    while ahead:
        place = ahead.pop()
        try:
            state = state_of(place)  # before its listing, so that a change meanwhile is noticed
            entries = sorted(os.scandir(place), key=lambda entry: entry.name)
        except OSError as error:
            yield UnreadableImage(place, f"cannot be listed ({error.strerror})")
            continue
        if places is not None:
            places.append(state)
        below: list[Path] = []
        for entry in entries:
            if entry.name.startswith(".") or entry.name in IGNORED:
                continue
            reason = why_no_file(entry)
            if not reason:
                yield entry.path
            elif not is_folder(entry):
                yield UnreadableImage(Path(entry.path), reason)
            elif leads_up(entry):
                yield UnreadableImage(Path(entry.path), LINK_UPWARD)
            else:
                below.append(Path(entry.path))
        ahead += reversed(below)


@dataclass(frozen=True)
class ListedClass:
    """The files of one class, the folders that they are in, and what cannot be used."""

    files: FileList
    places: list[Shard]
    unreadable: list[UnreadableImage]


def list_class(folder: Path, name: str) -> ListedClass:
    """Return the files of a class of a split; raises `UserError` for a class without any."""
    listed = ListedClass(FileList(folder), [], [])
    for entry in scan_class(folder / name, listed.places):
        if isinstance(entry, str):
            listed.files.append(entry)
        else:
            listed.unreadable.append(entry)
    if not len(listed.files):
        raise empty_class_error(folder, name, listed.unreadable)
    return listed


def list_split(folder: Path, classes: tuple[str, ...], cache_dir: Path | None = None) -> ImageList:
    """Return the files of a split; raises `UserError` where a class has none.

    Those of a large one are kept in the cache, and are listed again when one of its folders has changed.
    """
    began_ns, list_one = time.time_ns(), partial(list_class, folder)
    unreadable: list[UnreadableImage] = []
    first = list_one(classes[0])  # says how large the split is

    def join(others: Iterable[ListedClass]) -> Index:
        return join_classes(folder, classes, chain([first], others), unreadable, began_ns)

    def list_all() -> Index:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(WAITING_AT_ONCE) as pool:
            return join(pool.map(list_one, classes[1:]))

    if len(classes) < INDEXED_CLASSES and len(first.files) * len(classes) < INDEXED_IMAGES:
        index = join(map(list_one, classes[1:]))
    else:
        index = load_index(folder, [folder, *(folder / name for name in classes)], cache_dir, list_all)
    return ImageList(folder, classes, index.files, index.labels, tuple(unreadable))


# Fewer are listed before anybody would notice.
INDEXED_CLASSES, INDEXED_IMAGES = 200, 20_000
# The time (s) after which a line says how far the listing is.
SILENT_S = 2.0
# A folder that changes so soon (ns) after it was listed may keep its time.
SETTLED_NS = 2_000_000_000


def join_classes(
    folder: Path,
    classes: tuple[str, ...],
    listed: Iterable[ListedClass],
    unreadable: list[UnreadableImage],
    began_ns: int,
) -> Index:
    """Return the files of all classes, and add what cannot be used to `unreadable`.

    They are no index to be kept where a folder had just changed when the listing `began_ns` (Unix time), or something
    cannot be used.
    """
    files, labels, places = FileList(folder), array("q"), [state_of(folder)]
    due = time.monotonic() + SILENT_S
    for label, part in enumerate(listed):
        files.extend(part.files)
        labels.extend([label] * len(part.files))
        unreadable += part.unreadable
        places += part.places
        if time.monotonic() > due:
            done = f"{label + 1:,} of {len(classes):,} classes, {len(files):,} images so far"
            log(f"listing {one_line(folder)}: {done}")
            due = time.monotonic() + 5 * SILENT_S
    is_settled = max(place.mtime_ns for place in places) + SETTLED_NS < began_ns
    return Index(files, labels, tuple(places) if is_settled and not unreadable else ())


def list_splits(
    data_dir: Path,
    policy: str = "error",
    *,
    only_test: bool = False,
    cuts_val: bool = True,
    cache_dir: Path | None = None,
) -> tuple[ImageList, ImageList]:
    """Return train and test; raises `UserError` where their classes differ.

    A folder without test/ is split here, with a part for the choice of a checkpoint if `cuts_val`.

    With the policy `error` it also raises for the first entry that cannot be used.
    """
    with translate_folder_errors(data_dir):
        train, test, val, classes = split_classes(data_dir, only_test=only_test)
        tested = list_split(test, classes, cache_dir)
        if val:
            tested = append_split(tested, list_split(val, classes, cache_dir), test.parent)
        listings = tested if train == test else list_split(train, classes, cache_dir), tested
    unreadable = [one for listing in listings for one in listing.unreadable]
    if train == test and not only_test:
        listings = cut_listing(tested, cuts_val=cuts_val)
    if unreadable and policy == "error":
        raise unreadable_image_error(unreadable)
    return listings
