"""List the classes and files of an image folder; raises errors that name unusable entries."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from entrypoint.core.errors import UserError, printable

# Files that file managers create. Hidden files are ignored as well.
IGNORED_FILES = frozenset({"Thumbs.db", "desktop.ini"})


@dataclass(frozen=True)
class ImageList:
    """One split: its files, and the number of each file's class."""

    folder: Path
    classes: tuple[str, ...]
    files: tuple[Path, ...]
    labels: tuple[int, ...]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.files)


def split_folders(data_dir: Path | None) -> tuple[Path, Path]:
    """Return the folders of train and test (or val); raises `UserError` if one is missing."""
    if data_dir is None:
        raise UserError("TRAIN_DATASET=imagefolder: needs TRAIN_DATA_DIR, the folder that holds train/ and test/")
    if not data_dir.is_dir():
        what = "is a file, not a folder" if data_dir.exists() else "no such folder"
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {what}; name the one that holds train/ and test/")
    train = data_dir / "train"
    test = next((data_dir / name for name in ("test", "val") if (data_dir / name).is_dir()), None)
    if not train.is_dir() or test is None:
        found = sorted(entry.name for entry in data_dir.iterdir())[:5]
        holds = f"holds {', '.join(found)}" if found else "is empty"
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {holds}; it needs train/ and test/ (or val/)")
    return train, test


def class_names(folder: Path) -> tuple[str, ...]:
    """Return a split's classes, its subfolders sorted by name; raises `UserError` if there are none."""
    names = tuple(sorted(entry.name for entry in os.scandir(folder) if is_class(entry)))
    if not names:
        raise UserError(f"{folder}: no class folders; each class is a subfolder with its images")
    return names


def is_class(entry: os.DirEntry[str]) -> bool:
    """Return whether a folder's entry is a class."""
    return entry.is_dir() and not entry.name.startswith(".")


def files_of(folder: Path) -> Iterator[Path]:
    """Yield the files of one class in a fixed order, with those of subfolders; hidden ones are ignored."""
    for top, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and name not in IGNORED_FILES:
                yield Path(top, name)


def list_split(folder: Path, classes: tuple[str, ...]) -> ImageList:
    """Return all files of a split; raises `UserError` if a class has none."""
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        before = len(files)
        files.extend(files_of(folder / name))
        if len(files) == before:
            raise UserError(f"{folder / name}: the class has no images; add some or remove the folder")
        labels.extend([label] * (len(files) - before))
    return ImageList(folder, classes, tuple(files), tuple(labels))


def list_splits(data_dir: Path | None) -> tuple[ImageList, ImageList]:
    """Return train and test; raises `UserError` if their classes differ."""
    train, test = split_folders(data_dir)
    classes, test_classes = class_names(train), class_names(test)
    if classes != test_classes:
        only_train = sorted(set(classes) - set(test_classes))
        only_test = sorted(set(test_classes) - set(classes))
        differ = [f"only in {train.name}/: {', '.join(only_train[:5])}"] if only_train else []
        differ += [f"only in {test.name}/: {', '.join(only_test[:5])}"] if only_test else []
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: classes differ, {'; '.join(differ)}; both need the same ones"
        )
    return list_split(train, classes), list_split(test, classes)
