"""Images whose classes stand in CSV files: `train.csv` and `test.csv` with the columns `file` and `label`."""

from __future__ import annotations

import codecs
import csv
import os
import re
from array import array
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TextIO

from entrypoint.core.errors import UserError, one_line, printable
from entrypoint.core.paths import is_file, is_folder
from train.data.sources.image_file import FileList
from train.data.sources.image_folder import ImageList, append_split, classes_differ_error, find_alike

COLUMNS = ("file", "label")
DIVIDERS = (",", ";", "\t")
# A line of a CSV file has a path and a name; the csv module's own limit is larger.
MAX_NAME = 4096


def label_files(data_dir: Path | None, *, only_test: bool = False) -> tuple[Path, Path, Path | None]:
    """Return the files of train, test and val; without test.csv, val.csv is what is tested.

    With `only_test` the first two are the file to evaluate. Raises `UserError` where one is missing.
    """
    if data_dir is None:
        raise UserError("TRAIN_DATASET=csv: needs TRAIN_DATA_DIR, the folder that holds train.csv and test.csv")
    if not is_folder(data_dir):
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: no such folder; name the one that holds train.csv")
    found = {name: data_dir / f"{name}.csv" for name in ("train", "test", "val")}
    there = {name: path for name, path in found.items() if is_file(path)}
    test = there.get("test") or there.get("val")
    if test is None or ("train" not in there and not only_test):
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: needs train.csv and test.csv (or val.csv), and has"
            f" {', '.join(path.name for path in there.values()) or 'neither'}"
        )
    val = there.get("val") if "test" in there and not only_test else None
    return (test if only_test else there["train"]), test, val


def encoding_of(path: Path) -> str:
    """Return a CSV file's encoding by its first bytes: Excel's "Unicode text" is UTF-16; raises OSError."""
    with path.open("rb") as file:
        return "utf-16" if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"


def split_columns(path: Path, file: TextIO) -> tuple[Iterator[list[str]], int, int]:
    """Return the rows after the first line, and in which columns file and label are; raises `UserError`.

    Spreadsheets divide by commas, semicolons or tabs, as the country has it, and may say so in a line `sep=;`.
    """
    line = file.readline()
    if re.fullmatch("sep=.", line.strip(), re.IGNORECASE):
        line = file.readline()
    divider = max(DIVIDERS, key=line.count)
    header = next(csv.reader([line], delimiter=divider), [])
    names = [name.strip().lower() for name in header]
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        raise UserError(
            f"{one_line(path)}: has no column {', '.join(missing)}; its first line must name file and label, and names"
            f" {printable(', '.join(header)) or 'nothing'}"
        )
    return csv.reader(file, delimiter=divider), names.index(COLUMNS[0]), names.index(COLUMNS[1])


def read_rows(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield number, file and label of each line; raises `UserError` for a file that has not these columns."""
    try:
        with path.open(encoding=encoding_of(path), errors="surrogateescape", newline="") as file:
            rows, first, second = split_columns(path, file)
            for number, row in enumerate(rows, 2):
                if not any(row):  # what a spreadsheet writes for empty lines
                    continue
                name, label = (row[column] if column < len(row) else "" for column in (first, second))
                if not name or not label or len(name) > MAX_NAME:
                    raise UserError(f"{one_line(path)}, line {number}: has no file or no label; correct it")
                yield number, name.strip(), label.strip()
    except (csv.Error, UnicodeError) as error:
        raise UserError(f"{one_line(path)}: cannot be read as CSV ({printable(str(error))})") from None
    except OSError as error:
        raise UserError(f"{one_line(path)}: cannot be read ({error.strerror})") from None


def list_labelled(path: Path, classes: tuple[str, ...] | None = None) -> ImageList:
    """Return the images of a CSV file; paths are relative to its folder.

    Raises `UserError` for a file that is not there, is named twice, or is outside of the folder, and for a label that
    is not among the `classes`, if they are given.
    """
    rows = list(read_rows(path))
    if not rows:
        raise UserError(f"{one_line(path)}: has no line after the first; list some images")
    known = classes or tuple(sorted({label for _, _, label in rows}))
    numbers = {name: index for index, name in enumerate(known)}
    files, labels, folders, named = FileList(path.parent), array("q"), dict[Path, frozenset[str]](), set[str]()
    for line, name, label in rows:
        where = f"{one_line(path)}, line {line}"
        if "\\" in name and not is_file(path.parent / name):  # written on Windows
            name = name.replace("\\", "/")
        relative = PurePosixPath(os.path.normpath(name))
        if relative.is_relative_to(path.parent.absolute()):
            relative = relative.relative_to(path.parent.absolute())
        if relative.is_absolute() or relative.parts[:1] == ("..",):
            raise UserError(f"{where}: {printable(name)} is outside of the folder; name a path below {path.parent}")
        if str(relative) in named:
            raise UserError(f"{where}: {printable(name)} is listed twice; remove one")
        named.add(str(relative))
        folder = path.parent / relative.parent
        if folder not in folders:
            folders[folder] = names_in(folder)
        if relative.name not in folders[folder]:
            alike = find_alike(relative.name, folders[folder])
            raise UserError(f"{where}: {printable(name)} is not there;{alike} correct the path, or remove the line")
        if label not in numbers:
            raise UserError(f"{where}: {printable(label)} is no class of train.csv; correct it, or add images there")
        files.append(path.parent / relative)
        labels.append(numbers[label])
    return ImageList(path.parent, known, files, labels)


def names_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder, none if it cannot be read: one listing instead of a question for each file."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def list_label_splits(data_dir: Path | None, *, only_test: bool = False) -> tuple[ImageList, ImageList]:
    """Return train and test, with val.csv behind test.csv if there are both; raises `UserError`."""
    train_file, test_file, val_file = label_files(data_dir, only_test=only_test)
    train = list_labelled(train_file)
    test = train if only_test else list_labelled(test_file, train.classes)
    check_same_classes(data_dir, train, test, test_file.name)
    if val_file:
        val = list_labelled(val_file, train.classes)
        check_same_classes(data_dir, train, val, val_file.name)
        test = append_split(test, val, test.folder)
    return train, test


def check_same_classes(data_dir: Path | None, train: ImageList, other: ImageList, name: str) -> None:
    """Raise `UserError` if a split has no image of a class."""
    there = tuple(train.classes[label] for label in sorted(set(other.labels)))
    if there != train.classes:
        raise classes_differ_error(data_dir, ("train.csv", train.classes), (name, there))
