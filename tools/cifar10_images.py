"""The real CIFAR-10 images, for tests and benchmarks."""

from __future__ import annotations

import shutil
from pathlib import Path


def unpacked_images(place: Path, into: Path) -> Path:
    """Return the folder of images that `place` is, or that this archive unpacks to below `into`."""
    if place.is_dir():
        return place
    shutil.unpack_archive(place, into)
    return next(path.parent for path in into.glob("**/train") if path.is_dir())
