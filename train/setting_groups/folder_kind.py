"""Which kind of data set a folder is, by the names of what lies in it."""

from __future__ import annotations

import os
from collections.abc import Collection
from itertools import islice
from pathlib import Path

# The endings of images. Whatever the decoder then finds in a file is read.
IMAGE_ENDINGS = frozenset(
    ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff", "jp2", "avif")
)
# What the library datasets saves; the hub's own folders have parquet files in data/.
HUGGING_FACE = ("dataset_dict.json", "state.json")
# Left behind by archives of macOS.
IGNORED_FOLDERS = frozenset({"__MACOSX"})
# Entries of a class that are looked at until one is an image.
LOOKED_AT = 50


def kind_of_folder(folder: Path | None) -> str:
    """Return the TRAIN_DATASET that reads a folder, empty where it is none of them."""
    if folder is None:
        return ""
    try:
        names = os.listdir(folder)
        inside = os.listdir(folder / "train") if "train" in names else []
    except (OSError, ValueError):  # a null byte is no path
        return ""
    if "train.csv" in names:
        return "csv"
    if any(name.endswith(".tar") for name in (*names, *inside)):
        return "shards"
    if any(name in HUGGING_FACE for name in names) or any(
        has_file(folder / name, {"parquet"}) for name in ("", "data", "train")
    ):
        return "hf"
    root, classes = (folder / "train", inside) if "train" in names else (folder, names)
    is_class = (name for name in classes if not name.startswith(".") and name not in IGNORED_FOLDERS)
    return "imagefolder" if any(has_file(root / name, IMAGE_ENDINGS) for name in is_class) else ""


def has_file(folder: Path, endings: Collection[str]) -> bool:
    """Return whether one of a folder's first files has one of these endings."""
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.lower().rpartition(".")[2] in endings for entry in islice(entries, LOOKED_AT))
    except OSError:
        return False
