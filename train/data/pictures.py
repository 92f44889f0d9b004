"""One picture file to bytes of the wanted shape; what cannot be read is told by name, never raised halfway."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

# A photo is decoded at a half, a quarter or an eighth where that leaves so many times what is wanted: libjpeg skips the
# finest detail, which scaling down averages away (Pillow does so for its thumbnails). Measured: 3 times as fast for 12
# megapixels to 224x224, 1.8 for 3 megapixels, and 0.3 of 255 away from the whole picture's pixels.
GAP = 2

Pixels = NDArray[np.uint8]
Shape = tuple[int, int, int]


@dataclass(frozen=True)
class BadImage:
    """A file that is no picture, or a broken one, and why."""

    path: Path
    why: str

    def __str__(self) -> str:
        """Return the file and the reason."""
        return f"{self.path}: {self.why}"


def read_picture(path: Path, shape: Shape) -> Pixels | BadImage:
    """Return a picture as (height, width, channels) bytes, cut to the aspect and scaled to the size of `shape`.

    `shape` is (channels, height, width). A picture that has that size is not resampled.
    """
    channels, height, width = shape
    try:
        with Image.open(path) as opened:
            opened.draft(None, (GAP * width, GAP * height))  # of other formats it does nothing
            picture = opened.convert("L" if channels == 1 else "RGB")
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet: OSError, SyntaxError, struct.error
        return BadImage(path, reason(path, error))
    if picture.size != (width, height):
        picture = ImageOps.fit(picture, (width, height), method=Image.Resampling.BILINEAR)
    return np.array(picture, dtype=np.uint8).reshape(height, width, channels)


def reason(path: Path, error: Exception) -> str:
    """Say in a few words why a file could not be read as a picture."""
    if isinstance(error, FileNotFoundError | PermissionError):
        return error.strerror or "cannot be opened"
    if path.stat().st_size == 0:
        return "empty file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    return f"broken image ({error})"
