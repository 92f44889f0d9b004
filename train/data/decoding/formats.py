"""Opens images with Pillow, in the formats of the endings that are listed, and in no other one.

Pillow tries all its formats on every file, whatever its name: for PostScript it starts Ghostscript.
"""

from __future__ import annotations

from functools import cache
from typing import BinaryIO

from PIL import Image

# Of the endings in `train.data.sources.image_folder` and of shards; MPO is what some cameras write as .jpg.
FORMATS = ("JPEG", "MPO", "PNG", "PPM", "WEBP", "BMP", "GIF", "TIFF", "JPEG2000", "AVIF")


@cache
def known_formats() -> tuple[str, ...]:
    """Return the formats that this Pillow was built with."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def open_with_pillow(file: BinaryIO) -> Image.Image:
    """Open an image; raises what Pillow raises."""
    return Image.open(file, formats=known_formats())
