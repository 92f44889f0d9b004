"""What the label numbers of a list stand for where an image has no single class: several labels, or numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from entrypoint.core.errors import UserError, did_you_mean, printable
from train.setting_groups.data import DataSettings

# What a cell of a column with 0 and 1 may hold.
MARKS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False, "": False}

MAX_TARGET = 1e30


@dataclass
class Targets:
    """The targets of the images of all splits: a row of `values` for each label number, a value for each name.

    `names` are the outputs of the model. Equal rows have the same number, so that a list needs a number for each image.
    """

    names: tuple[str, ...]
    values: array[float] = field(default_factory=lambda: array("d"))
    numbers: dict[tuple[float, ...], int] = field(default_factory=dict)

    def number_of(self, row: tuple[float, ...]) -> int:
        """Return the label number of a row, a new one for a row that was not there yet."""
        number = self.numbers.setdefault(row, len(self.numbers))
        if number * len(self.names) == len(self.values):
            self.values.extend(row)
        return number

    def constant_names(self) -> tuple[str, ...]:
        """Return the names of targets that have one value for all images."""
        count = len(self.names)
        return tuple(name for index, name in enumerate(self.names) if len(set(self.values[index::count])) == 1)


def names_of_targets(settings: DataSettings, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """Return the outputs of a model for these columns: the columns themselves, or the labels in the only one."""
    if settings.task == "regress" or columns != ["label"]:
        return tuple(columns)
    return tuple(sorted({label for (cell,) in rows for label in split_labels(cell, settings.label_separator)}))


def split_labels(cell: str, separator: str) -> list[str]:
    """Return the labels in a cell; `space` is any blanks, as a setting has none at its end."""
    return [part for part in map(str.strip, cell.split(None if separator == "space" else separator)) if part]


def read_target(settings: DataSettings, names: Sequence[str], cells: Sequence[str], where: str) -> tuple[float, ...]:
    """Return the row of targets that an image's cells give; raises `UserError` for cells that give none."""
    if settings.task == "regress":
        return tuple(read_number(cell, where) for cell in cells)
    if len(cells) == len(names) and all(cell.lower() in MARKS for cell in cells):
        return tuple(float(MARKS[cell.lower()]) for cell in cells)
    if len(cells) > 1:
        odd = next(cell for cell in cells if cell.lower() not in MARKS)
        raise UserError(
            f"{where}: {printable(odd)} is neither 0 nor 1. Correct it, or name the columns file and label."
        )
    return mark_labels(names, split_labels(cells[0], settings.label_separator), where, "train.csv")


def mark_labels(names: Sequence[str], labels: Sequence[str], where: str, place: str) -> tuple[float, ...]:
    """Return the row of 0 and 1 for some labels; raises `UserError` for one that is not in the `place` of the names."""
    for label in labels:
        if label not in names:
            raise UserError(
                f"{where}: {printable(label)} is no class of {place}. {did_you_mean(label, list(names))}Correct it,"
                " or add images there."
            )
    return tuple(float(name in labels) for name in names)


def read_number(cell: str, where: str) -> float:
    """Return the number in a cell; raises `UserError` for none."""
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not abs(number) < MAX_TARGET:  # not a number, or beyond what floats of a network hold
        raise UserError(f"{where}: {printable(cell) or 'an empty cell'} is no number. Correct it, or remove the line.")
    return number


def check_single_labels(labels: Iterable[str], where: str, task: str = "classify") -> None:
    """Raise `UserError` for no labels, and for one that looks like several in a cell: its parts are labels too.

    One such part is enough where images may have several labels, but for blanks: `sea` and `sea lion` are two.
    """
    known = set(labels)
    if not known:
        raise UserError(f"{where}: no image has a label. Add some.")
    for divider in ("|", ";", ",", " "):
        several = {label: split_labels(label, divider) for label in known}
        several = {label: parts for label, parts in several.items() if len(parts) > 1}
        is_enough = all if task == "classify" or divider == " " else any
        odd = next((label for label, parts in several.items() if is_enough(part in known for part in parts)), "")
        if odd:
            raise UserError(
                f"{where}: label {printable(odd)} looks like several labels, as each part is a label too. Set"
                f" TRAIN_TASK=multilabel and TRAIN_LABEL_SEPARATOR='{divider.replace(' ', 'space')}', or rename it."
            )
