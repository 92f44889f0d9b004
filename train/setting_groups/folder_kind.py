"""Which kind of data set a folder is, by the names of what lies in it."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

# The endings of images. Whatever the decoder then finds in a file is read.
IMAGE_ENDINGS = frozenset(
    ("jpg", "jpeg", "png", "ppm", "pgm", "pbm", "pnm", "webp", "bmp", "gif", "tif", "tiff", "jp2", "avif")
)
# Left behind by archives of macOS.
IGNORED_FOLDERS = frozenset({"__MACOSX"})
# Entries of a class that are looked at until one is an image.
LOOKED_AT = 50


def kind_of_folder(folder: Path | None) -> str:
    """Return the TRAIN_DATASET that reads a folder, empty where it is none of them."""
    try:
        names = os.listdir(folder) if folder else []
        train = folder / "train" if folder else Path()
        inside = os.listdir(train) if "train" in names else []
    except (OSError, ValueError):  # a null byte is no path
        return ""
    if "train.csv" in names:
        return "csv"
    if any(name.endswith(".tar") for name in (*names, *inside)):
        return "shards"
    root, classes = (train, inside) if "train" in names else (folder or Path(), names)
    is_class = (name for name in classes if not name.startswith(".") and name not in IGNORED_FOLDERS)
    return "imagefolder" if any(has_image(root / name) for name in is_class) else ""


def has_image(folder: Path) -> bool:
    """Return whether one of a folder's first files has the ending of an image."""
    try:
        with os.scandir(folder) as entries:
            return any(entry.name.lower().rpartition(".")[2] in IMAGE_ENDINGS for entry in islice(entries, LOOKED_AT))
    except OSError:
        return False
