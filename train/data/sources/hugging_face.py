"""Data sets of Hugging Face: a folder of parquet or arrow files, the hub's cache, or the hub."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.packages import package_version, require_extra
from train.data.sources.image_file import read_file
from train.setting_groups.data import DataSettings
from train.setting_groups.folder_kind import HUGGING_FACE

# The hub's names of a split, best first. A test split may come without its labels.
VAL = ("validation", "valid", "val", "dev")
NAMES = {"train": ("train",), "test": ("test", *VAL), "val": VAL}
# Without any other, so much of the training split is what tests.
TEST_SHARE = 0.1


class HuggingFaceSplit:
    """One split as the trainer reads data sets of the user's: encoded images by index, with their labels."""

    def __init__(self, rows: Any, columns: tuple[str, str], *, several: bool) -> None:
        (self.image, self.label), self.rows, self.several = columns, rows, several
        feature = rows.features[self.label]
        self.classes: list[str] = list(getattr(getattr(feature, "feature", feature), "names", ()))

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[bytes, Any]:
        """Return the bytes of an image, and its label; raises OSError for one that is not there."""
        image = self.rows[row][self.image]
        if not image:
            raise OSError("its row has no image")
        content = image["bytes"] or read_file(Path(image["path"]))  # a row may name any file, and a pipe would hang
        return content, self.targets[row]

    @property
    def fingerprint(self) -> str:
        """A digest of the labels and of what is stored of 256 images."""
        digest = hashlib.blake2b(json.dumps(self.targets).encode(), digest_size=16)
        for row in range(0, len(self), max(1, len(self) // 256)):
            digest.update(str(self.rows[row][self.image]).encode())
        return digest.hexdigest()

    @cached_property
    def targets(self) -> list[Any]:
        """The label of each image; of several classes a list of 0 and 1."""
        labels = list(self.rows[self.label])
        if not self.several or not self.classes:
            return labels
        return [[float(number in row) for number in range(len(self.classes))] for row in labels]


def open_hugging_face(settings: DataSettings, split: str) -> HuggingFaceSplit | None:
    """Return a split, None for `val` where there is none; raises `UserError` for what cannot be read.

    datasets runs no code of a data set from version 4 on, so no older one is used.
    """
    source = f"TRAIN_DATASET={printable(settings.dataset)}"
    require_extra("hf", source)
    if int(package_version("datasets").partition(".")[0]) < 4:
        raise UserError(f"{source}: needs datasets 4 or newer, which runs no code of a data set.", ExitCode.MACHINE)
    import datasets

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    place = settings.data_dir if settings.dataset == "hf" else Path(settings.dataset[3:]).expanduser()
    if place is None:
        raise UserError(f"{source}: needs TRAIN_DATA_DIR, a folder of parquet or arrow files, or hf:NAME of the hub.")
    if "://" in settings.dataset:
        loaded = datasets.load_dataset(
            "parquet",
            data_files=remote_files(settings.dataset[3:].rstrip("/")),
            download_config=datasets.DownloadConfig(use_etag=True),  # else a changed file is taken for the old one
        )
    else:
        is_saved = any((place / name).is_file() for name in HUGGING_FACE)
        loaded = (datasets.load_from_disk if is_saved else datasets.load_dataset)(str(place))
    splits = loaded if isinstance(loaded, dict) else {"train": loaded}
    columns = choose_columns(settings, source, next(iter(splits.values())).features)
    known = {name: rows for name, rows in splits.items() if name == "train" or has_labels(rows, columns[1])}
    if "train" in known and not any(name in known for name in NAMES["test"]):
        rows, order = known["train"], np.random.default_rng(0).permutation(len(known["train"]))  # with any TRAIN_SEED
        tested = math.ceil(TEST_SHARE * len(rows))
        known = {
            "train": rows.select(order[tested:], keep_in_memory=True),  # the user's folder stays as it is
            "test": rows.select(order[:tested], keep_in_memory=True),
        }
    names = [name for name in NAMES[split] if name in known]
    if not names or (split == "val" and "test" not in known):  # it is what tests then
        return None
    rows = known[names[0]].select_columns(list(columns)).cast_column(columns[0], datasets.Image(decode=False))
    return HuggingFaceSplit(rows, columns, several=settings.task == "multilabel")


def remote_files(url: str) -> dict[str, list[str]]:
    """Return the files below a URL by split, as datasets knows them by their names and fsspec finds them.

    What datasets downloads is in its cache, by address and ETag, so each node downloads a file once, and again when it
    was changed.
    """
    from datasets.data_files import get_data_patterns

    return {split: [f"{url}/{pattern}" for pattern in found] for split, found in get_data_patterns(url).items()}


def choose_columns(settings: DataSettings, source: str, features: Any) -> tuple[str, str]:
    """Return the columns of images and labels, by TRAIN_DATA_COLUMNS or by their types; raises `UserError`."""
    if settings.data_columns:
        image, _, label = settings.data_columns.partition(",")
        if unknown := [name for name in (image, label) if name not in features]:
            columns = ", ".join(map(printable, features))
            raise UserError(f"TRAIN_DATA_COLUMNS: no column {printable(unknown[0])}. Choose of {columns}.")
        return image, label
    kinds = {name: type(getattr(feature, "feature", feature)).__name__ for name, feature in features.items()}
    images, labels = ([name for name, kind in kinds.items() if kind == wanted] for wanted in ("Image", "ClassLabel"))
    if len(images) != 1 or len(labels) != 1:
        columns = ", ".join(f"{printable(name)} ({kind})" for name, kind in kinds.items())
        raise UserError(
            f"{source}: has {len(images)} columns of images and {len(labels)} of class labels among {columns}."
            " Set TRAIN_DATA_COLUMNS=IMAGE,LABEL."
        )
    return images[0], labels[0]


def has_labels(rows: Any, label: str) -> bool:
    """Return whether a split has its labels, which a public test split may lack: -1 stands there."""
    return bool(len(rows)) and rows[label][0] not in (-1, None)
