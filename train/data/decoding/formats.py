"""Opens images with Pillow, in the formats of the endings that are listed, and in no other one.

Pillow tries all its formats on every file, whatever its name: for PostScript it starts Ghostscript.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

# Of the endings in `train.data.sources.image_folder` and of shards; MPO is what some cameras write as .jpg.
FORMATS = ("JPEG", "MPO", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "AVIF")
PREFIX_BYTES = 16


class OtherFormatError(UnidentifiedImageError):
    """Names the format of an image that is not read."""


@cache
def known_formats() -> tuple[str, ...]:
    """Return the formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_with_pillow(file: BinaryIO | Path) -> Image.Image:
    """Open an image; raises what Pillow raises, and `OtherFormatError`."""
    try:
        return Image.open(file, formats=known_formats())
    except UnidentifiedImageError:
        if name := other_format(file):
            raise OtherFormatError(f"its format is {name}, which is not read") from None
        raise


def other_format(file: BinaryIO | Path) -> str:
    """Return the format by the first bytes alone, empty if they say none."""
    if isinstance(file, Path):
        with file.open("rb") as opened:
            prefix = opened.read(PREFIX_BYTES)
    else:
        file.seek(0)
        prefix = file.read(PREFIX_BYTES)
    checks = ((name, accept) for name, (_, accept) in Image.OPEN.items() if accept and name not in FORMATS)
    return next((name for name, accept in checks if accept(prefix) is True), "")
