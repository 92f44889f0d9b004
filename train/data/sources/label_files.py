"""Images whose labels stand in CSV files: `train.csv` and `test.csv` with the columns `file` and `label`."""

from __future__ import annotations

import codecs
import csv
import os
import re
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TextIO

from entrypoint.core.errors import UserError, one_line, printable, refuse_if
from entrypoint.core.files import is_file
from train.data.sources.image_file import FileList
from train.data.sources.image_list import (
    SPLIT_OF,
    ImageList,
    append_split,
    check_same_classes,
    cut_listing,
    find_alike,
    split_places,
)
from train.data.sources.targets import Targets, check_single_labels, names_of_targets, read_target
from train.setting_groups.data import DataSettings

# What others call the two columns (Hugging Face's imagefolder, Keras, fastai, timm).
OTHER_NAMES = {
    "file": ("filename", "file_name", "filepath", "file_path", "path", "image", "image_path", "image_id"),
    "label": ("class", "class_name", "target", "category"),
}
DIVIDERS = (",", ";", "\t")
# What a column is called that says which split an image is of.
SPLIT_COLUMNS = ("split", "set", "subset", "partition")
# A line of a CSV file has a path and a name; the csv module's own limit is larger.
MAX_NAME = 4096


def label_files(data_dir: Path, *, only_test: bool = False) -> tuple[Path, Path, Path | None]:
    """Return the files of train, test and val; without test.csv, val.csv is what is tested.

    With `only_test` the first two are the file to evaluate. Those of a train.csv alone are the same, as it is split.
    Raises `UserError` where one is missing.
    """
    there = {name: path for name, path in split_places(data_dir, ".csv").items() if is_file(path)}
    test = there.get("test") or there.get("val") or (None if only_test else there.get("train"))
    if test is None or ("train" not in there and not only_test):
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: needs train.csv, or test.csv (or val.csv) to evaluate, and has"
            f" {', '.join(path.name for path in there.values()) or 'neither'}"
        )
    val = there.get("val") if "test" in there and not only_test else None
    return (test if only_test else there["train"]), test, val


@dataclass(frozen=True)
class LabelTable:
    """The lines of a CSV file: the names of its columns of labels, and (line, file, cells) of each image."""

    path: Path
    columns: list[str]
    rows: list[tuple[int, str, list[str]]]


def split_columns(path: Path, file: TextIO, task: str) -> tuple[Iterator[list[str]], list[str]]:
    """Return the rows after the first line, and the names of the columns; raises `UserError`.

    Spreadsheets divide by commas, semicolons or tabs, as the country has it, and may say so in a line `sep=;`.
    """
    line = file.readline()
    if re.fullmatch("sep=.", line.strip(), re.IGNORECASE):
        line = file.readline()
    divider = max(DIVIDERS, key=line.count)
    header = next(csv.reader([line], delimiter=divider), [])
    plain = [name.strip().lower() for name in header]
    names = [known if known in ("file", "label") else name.strip() for name, known in zip(header, plain, strict=True)]
    wanted = ("file", "label") if task == "classify" else ("file",)
    for column in wanted:
        other = next((name for name in OTHER_NAMES[column] if name in plain), "")
        if column not in names and other:
            names[plain.index(other)] = column
    missing = [column for column in wanted if column not in names]
    refuse_if(
        {
            f"{one_line(path)}: has no column {', '.join(missing) or 'of labels'}; its first line must name file and"
            f" label, and names {printable(', '.join(header)) or 'nothing'}. For other columns set"
            " TRAIN_TASK=multilabel or regress": missing or len(set(names)) < 2,
            f"{one_line(path)}: two columns have the same name. Rename one.": len(set(names)) < len(names),
            f"{one_line(path)}: a column has no name, as the index that pandas writes. Name it, or remove it.": (
                "" in names and "label" not in names
            ),
        }
    )
    return csv.reader(file, delimiter=divider), names


def read_table(path: Path, task: str) -> LabelTable:
    """Return the lines of a CSV file; raises `UserError` for one that has not these columns, or no lines.

    A column `label` holds all that is known of an image; without it the task takes all columns but the file's.
    """
    rows: list[tuple[int, str, list[str]]] = []
    try:
        with path.open("rb") as file:  # Excel's "Unicode text" is UTF-16
            is_wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        with path.open(encoding="utf-16" if is_wide else "utf-8-sig", errors="surrogateescape", newline="") as file:
            lines, names = split_columns(path, file, task)
            columns = ["label"] if "label" in names else [name for name in names if name != "file"]
            places = [names.index(name) for name in ("file", *columns)]
            marked = next((index for index, name in enumerate(names) if name.lower() in SPLIT_COLUMNS), len(names))
            for number, row in enumerate(lines, 2):
                if not any(row):  # what a spreadsheet writes for empty lines
                    continue
                if any(row[len(names) :]):
                    raise UserError(
                        f"{one_line(path)}, line {number}: has {len(row)} cells, and the first line {len(names)}."
                        " Quote cells with a divider in them."
                    )
                split = SPLIT_OF.get("".join(row[marked : marked + 1]).strip().lower(), SPLIT_OF[path.stem.lower()])
                if split != SPLIT_OF[path.stem.lower()]:
                    raise UserError(
                        f"{one_line(path)}, line {number}: column {printable(names[marked])} says that it is of"
                        f" {split}. Write a file for each of train, val and test."
                    )
                name, *cells = (row[place].strip() if place < len(row) else "" for place in places)
                # What `surrogateescape` makes of bytes that are no UTF-8; files may have any names.
                looked_at = (text for text in (*cells, *(() if rows else columns)) if not text.isascii())
                if odd := next((text for text in looked_at if re.search("[\udc80-\udcff]", text)), ""):
                    raise UserError(
                        f"{one_line(path)}, line {number}: {printable(odd)} is no UTF-8. Save the file as CSV UTF-8."
                    )
                if not name or (task == "classify" and not cells[0]) or len(name) > MAX_NAME:
                    raise UserError(f"{one_line(path)}, line {number}: has no file or no label; correct it")
                rows.append((number, name, cells))
    except (csv.Error, UnicodeError) as error:
        raise UserError(f"{one_line(path)}: cannot be read as CSV ({printable(str(error))})") from None
    except OSError as error:
        raise UserError(f"{one_line(path)}: cannot be read ({error.strerror})") from None
    if not rows:
        raise UserError(f"{one_line(path)}: has no line after the first; list some images")
    return LabelTable(path, columns, rows)


def list_labelled(
    settings: DataSettings, table: LabelTable, classes: tuple[str, ...], targets: Targets | None
) -> ImageList:
    """Return the images of a CSV file; paths are relative to its folder.

    Raises `UserError` for a file that is not there, is named twice, or is outside of the folder.
    """
    path, numbers = table.path, {name: index for index, name in enumerate(classes)}
    files, labels, folders, named = FileList(path.parent), array("q"), dict[Path, frozenset[str]](), set[str]()
    for line, name, cells in table.rows:
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
        files.append(path.parent / relative)
        labels.append(label_number(settings, numbers, targets, cells, where))
    return ImageList(path.parent, classes, files, labels, targets=targets)


def names_in(folder: Path) -> frozenset[str]:
    """Return the names in a folder, none if it cannot be read: one listing instead of a question for each file."""
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def list_label_splits(
    settings: DataSettings, data_dir: Path, *, only_test: bool = False, cuts_val: bool = True
) -> tuple[ImageList, ImageList]:
    """Return train and test, with val.csv behind test.csv if there are both; raises `UserError`.

    The images of a train.csv alone are split here, with a part for the choice of a checkpoint if `cuts_val`.
    """
    train_file, test_file, val_file = label_files(data_dir, only_test=only_test)
    tables = {path: read_table(path, settings.task) for path in (train_file, test_file, val_file) if path}
    train_table = tables[train_file]
    for table in tables.values():
        if table.columns != train_table.columns:
            raise UserError(
                f"{one_line(table.path)}: its first line names other columns than {train_file.name}, or in another"
                " order. Write the same ones."
            )
    cells = [cells for _, _, cells in train_table.rows]
    targets: Targets | None = None
    if settings.task == "classify":
        classes = tuple(sorted({label for (label,) in cells}))
    else:
        classes = names_of_targets(settings, train_table.columns, cells)
        targets = Targets(classes)
    check_single_labels(classes, one_line(train_file), settings.task)
    listings = {path: list_labelled(settings, table, classes, targets) for path, table in tables.items()}
    if not targets:
        used = {path.name: sorted(set(listing.labels)) for path, listing in listings.items()}
        check_same_classes(data_dir, {name: tuple(classes[row] for row in rows) for name, rows in used.items()})
    train, test = listings[train_file], listings[test_file]
    if train_file == test_file and not only_test:
        return cut_listing(train, cuts_val=cuts_val)
    return train, append_split(test, listings[val_file], test.folder) if val_file else test


def label_number(
    settings: DataSettings, numbers: Mapping[str, int], targets: Targets | None, cells: list[str], where: str
) -> int:
    """Return the label number of an image's cells; raises `UserError` for those of no class, or that hold no target.

    `numbers` are those of the classes.
    """
    if targets:
        return targets.number_of(read_target(settings, targets.names, cells, where))
    if cells[0] not in numbers:
        raise UserError(f"{where}: {printable(cells[0])} is no class of train.csv; correct it, or add images there")
    return numbers[cells[0]]
