"""Images in tar shards as webdataset writes them: `train/*.tar` and `test/*.tar`, or `train-*.tar` and `test-*.tar`."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, count_text, one_line, printable
from entrypoint.core.files import exists, is_folder, read_regular
from train.data.sources.image_file import WAITING_AT_ONCE, FileList
from train.data.sources.image_folder import translate_folder_errors, what_is_there, why_no_file
from train.data.sources.image_index import Index, load_index, state_of
from train.data.sources.image_list import ImageList, append_split, check_same_classes
from train.data.sources.tar_headers import Label, read_shard
from train.data.sources.targets import Targets, mark_labels

SPLITS = ("train", "test", "val")
# The split of a shard at the top of the folder: train.tar, train-000000.tar, train_a.tar.
SPLIT_NAME = re.compile(r"(train|test|val)(?:ing|id|idation)?(?![A-Za-z])", re.ASCII)
# Compressed ones are found too, to be refused.
SHARD_NAME = re.compile(r"[^.].*\.(tar|tar\.\w+|tgz|tbz2|txz|tzst)", re.ASCII | re.DOTALL | re.IGNORECASE)
CLASSES_FILE = "classes.txt"
# Fewer bytes are read so soon that nobody waits.
LARGE_BYTES = 1 << 30
NEEDS = "it needs train/*.tar and test/*.tar (or val/), or train-*.tar and test-*.tar"


def list_shard_splits(
    data_dir: Path, cache_dir: Path | None, task: str = "classify", *, only_test: bool = False
) -> tuple[ImageList, ImageList]:
    """Return train and test, with val behind test if there are both; raises `UserError`.

    With `only_test` both are the shards to evaluate: test, or val, or all shards of a folder without splits.
    """
    with translate_folder_errors(data_dir):
        shards = find_test(data_dir) if only_test else find_splits(data_dir)
        names = read_classes(data_dir)
        indexes = {
            split: load_index(
                data_dir,
                paths,
                cache_dir,
                partial(build_index, data_dir, paths, task),
                kind="" if task == "classify" else task,
            )
            for split, paths in shards.items()
        }
    if task == "classify":
        splits = {split: named_classes(data_dir, index, names) for split, index in indexes.items()}
    else:
        first = next(iter(indexes))
        targets = Targets(names or names_of_rows(data_dir, indexes[first].rows))
        where = CLASSES_FILE if names else f"{first}/"
        splits = {split: with_targets(data_dir, index, targets, where) for split, index in indexes.items()}
    if not only_test and task == "classify":
        listed = {f"{split}/": one.classes for split, one in splits.items()} | ({CLASSES_FILE: names} if names else {})
        check_same_classes(data_dir, listed)
    if "train" not in splits:
        return splits["test"], splits["test"]
    test = splits["test"]
    return splits["train"], append_split(test, splits["val"], data_dir) if "val" in splits else test


def build_index(folder: Path, shards: Sequence[Path], task: str = "classify") -> Index:
    """Read the headers of all shards; raises `UserError` or `OSError` for the first one that cannot be used."""
    total = sum(state_of(path).size for path in shards)
    if total >= LARGE_BYTES:
        log(f"reading the headers of {len(shards):,} shards, {total / 2**30:,.1f} GiB, in {one_line(folder)}")
    files, labels, rows = FileList(folder), array("q"), dict[Label, int]()
    with ThreadPoolExecutor(WAITING_AT_ONCE) as pool:
        try:
            for images, found in pool.map(partial(read_shard, task=task), shards):
                files.extend(images)
                labels.extend(label if isinstance(label, int) else rows.setdefault(label, len(rows)) for label in found)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return Index(files, labels, tuple(files.shards), tuple(rows))  # type: ignore[arg-type]  # none is a number


def named_classes(data_dir: Path, index: Index, names: tuple[str, ...]) -> ImageList:
    """Return the images of a split with its classes in order of number; `names` are those of classes.txt, if any.

    Raises `UserError` for a number that classes.txt does not name.
    """
    files, labels = index.files, index.labels
    present = sorted(set(labels))
    if names and present[-1] >= len(names):
        where = printable(files.relative(labels.index(present[-1])))
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: {where} has label {present[-1]}, and {CLASSES_FILE} names"
            f" {len(names):,} classes from 0 on. Correct one of the two."
        )
    classes = tuple(names[number] if names else str(number) for number in present)
    rows = {number: row for row, number in enumerate(present)}
    return ImageList(data_dir, classes, files, array("q", map(rows.__getitem__, labels)))


def names_of_rows(data_dir: Path, rows: Sequence[tuple[str | float, ...]]) -> tuple[str, ...]:
    """Return the outputs of a model without classes.txt: the labels that are there, or a number for each value.

    Raises `UserError` where no image has a label.
    """
    names = sorted({value for row in rows for value in row if isinstance(value, str)})
    names = names or [f"value{index}" for index in range(max(map(len, rows)))]
    if not names:
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: no image has a label. Add some.")
    return tuple(names)


def with_targets(data_dir: Path, index: Index, targets: Targets, place: str) -> ImageList:
    """Return the images of a split with their targets; raises `UserError` for a row that does not fit.

    `place` is where their names are.
    """
    names, numbers = targets.names, list[int]()
    known = frozenset(names)
    for number, row in enumerate(index.rows):
        labels = [value for value in row if isinstance(value, str)]
        fits = known.issuperset(labels) if labels or not row else len(row) == len(names)
        where = "" if fits else printable(index.files.relative(index.labels.index(number)))
        if not fits and not labels:
            raise UserError(
                f"TRAIN_DATA_DIR={printable(data_dir)}: {where} has {count_text(len(row), 'value')}, and there are"
                f" {count_text(len(names), 'target')}, {printable(', '.join(names))}. Correct one of the two."
            )
        values = mark_labels(names, labels, where, place) if labels or not row else tuple(map(float, row))
        numbers.append(targets.number_of(values))
    return ImageList(data_dir, names, index.files, array("q", map(numbers.__getitem__, index.labels)), targets=targets)


def read_classes(data_dir: Path) -> tuple[str, ...]:
    """Return the names in classes.txt, a line each, of the folder or of train/; none if it is not there.

    Raises `UserError` for a file that cannot be read, an empty line, and a name that is there twice.
    """
    path = next((one for one in (data_dir / CLASSES_FILE, data_dir / "train" / CLASSES_FILE) if exists(one)), None)
    if path is None:
        return ()
    names: dict[str, None] = {}
    for number, line in enumerate(read_regular(path).removeprefix("\ufeff").rstrip().split("\n"), 1):
        name = line.strip()
        if not name or name in names:
            problem = f"{printable(name)} is there twice" if name else "is no name"
            raise UserError(f"{one_line(path)}, line {number}: {problem}. Each line names a class, from 0 on.")
        names[name] = None
    return tuple(names)


def find_splits(data_dir: Path) -> dict[str, list[Path]]:
    """Return the shards of train and test, and of val if there are all; without test, val is what is tested.

    Raises `UserError` for a split that is not there, or is in two places, and for a shard of no split.
    """
    top, splits = shards_in(data_dir), shards_by_split(data_dir)
    odd = [path.name for path in top if not SPLIT_NAME.match(path.name)]
    if "train" not in splits or not splits.keys() & {"test", "val"}:
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {what_is_there(data_dir)}; {NEEDS}.")
    if odd and any(path.parent == data_dir for shards in splits.values() for path in shards):
        raise UserError(
            f"TRAIN_DATA_DIR={printable(data_dir)}: {printable(odd[0])} is of no split. Name it train-*.tar, test-*.tar"
            " or val-*.tar, or move it away."
        )
    if "test" not in splits:
        splits = {"train": splits["train"], "test": splits["val"]}
    return splits


def find_test(data_dir: Path) -> dict[str, list[Path]]:
    """Return the shards to evaluate; raises `UserError` if there are none."""
    splits = shards_by_split(data_dir)
    shards = splits.get("test") or splits.get("val") or shards_in(data_dir)
    if not shards:
        raise UserError(f"TRAIN_DATA_DIR={printable(data_dir)}: {what_is_there(data_dir)}; it needs *.tar to evaluate.")
    return {"test": shards}


def shards_by_split(data_dir: Path) -> dict[str, list[Path]]:
    """Return the shards of each split that is there, in a folder of its own or by name; raises `UserError`."""
    top, splits = shards_in(data_dir), dict[str, list[Path]]()
    for split in SPLITS:
        inside = shards_in(data_dir / split) if is_folder(data_dir / split) else []
        named = [path for path in top if (found := SPLIT_NAME.match(path.name)) and found[1] == split]
        if inside and named:
            raise UserError(
                f"TRAIN_DATA_DIR={printable(data_dir)}: has shards in {split}/, and {printable(named[0].name)} next to"
                " it. Move them together."
            )
        if inside or named:
            splits[split] = inside or named
    return splits


def shards_in(folder: Path) -> list[Path]:
    """Return the tar files of a folder in order of name; raises `OSError`, and `UserError` for what is no file."""
    shards = sorted(
        (entry for entry in os.scandir(folder) if SHARD_NAME.fullmatch(entry.name)), key=lambda entry: entry.name
    )
    for entry in shards:
        if reason := why_no_file(entry):
            raise UserError(f"TRAIN_DATA_DIR: {one_line(entry.path)} is no shard, but {reason}. Remove it.")
    return [Path(entry.path) for entry in shards]
