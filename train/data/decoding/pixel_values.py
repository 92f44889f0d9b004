"""What a viewer shows of an image file: 8 bits a channel, upright, transparent parts on white.

Pillow opens images in the formats of the endings that are listed, and in no other one. It tries all its formats on
every file, whatever its name: for PostScript it starts Ghostscript.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from train.transforms.image_part import ORIENTATIONS, UPRIGHT

# Modes of Pillow without color. A palette may have colors.
GRAY_MODES = frozenset({"1", "L", "LA", "La", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"})
ORIENTATION_TAG = 0x0112
# Pillow warns of large images and odd tags by printing a line of its source code. What it cannot read, it raises.
warnings.filterwarnings("ignore", module=r"PIL\.")
MAX_8_BITS, MAX_16_BITS = 255, 65_535
# TIFF 6.0, section 3: the bits of a value, and the meaning of its smallest one.
TIFF_BITS_PER_SAMPLE, TIFF_PHOTOMETRIC, TIFF_WHITE_IS_ZERO = 258, 262, 0


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


def orientation_of(image: Image.Image) -> int:
    """Return an image's EXIF orientation, 1 (upright) if it has none or an unknown one."""
    orientation = image.getexif().get(ORIENTATION_TAG, UPRIGHT)
    return orientation if orientation in ORIENTATIONS else UPRIGHT


def convert_to_visible(image: Image.Image, channels: int) -> Image.Image:
    """Return an image as a viewer shows it, but not turned, in mode L for one channel, else RGB.

    Raises `ValueError` for pixel values whose range is unknown.
    """
    image.load()
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        image = Image.fromarray(to_8_bits(image))
    if image.mode == "La":  # Pillow converts it to LA only
        image = image.convert("LA")
    if image.has_transparency_data:
        ground = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    if channels == 1 and image.mode not in ("1", "L"):
        image = image.convert("RGB")  # from LAB and HSV, Pillow converts to RGB only
    return image.convert("L" if channels == 1 else "RGB")


def to_8_bits(image: Image.Image) -> NDArray[np.uint8]:
    """Return the gray values of a 12-bit, 16-bit, 32-bit or float image, from 0 to 255.

    Pillow inverts TIFFs whose 0 is white for up to 8 bits only.
    """
    tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
    values = np.asarray(image)
    if image.mode.startswith("I;16"):
        largest = 2 ** tags.get(TIFF_BITS_PER_SAMPLE, (16,))[0] - 1
        gray: NDArray[np.uint8] = (values.astype(np.uint32) * MAX_8_BITS // largest).astype(np.uint8)
        transparent = image.info.get("transparency")
        gray = np.where(values == transparent, np.uint8(MAX_8_BITS), gray) if isinstance(transparent, int) else gray
    else:
        gray = scale_unknown_range(values, is_float=image.mode == "F")
    inverted = tags and tags.get(TIFF_PHOTOMETRIC, TIFF_WHITE_IS_ZERO) == TIFF_WHITE_IS_ZERO
    return ~gray if inverted else gray


def scale_unknown_range(values: NDArray[Any], *, is_float: bool) -> NDArray[np.uint8]:
    """Return the values of a file of 32 bits, which does not say their range, as bytes.

    The range is the smallest of 1 (floats), 255 and 65535 that holds every value of the file.
    Raises `ValueError` if there is none.
    """
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= MAX_16_BITS):  # not so either for NaN
        raise ValueError(f"values from {low} to {high}: the range is unknown, convert the file to 8 or 16 bits")
    if is_float:
        scale = 255.0 if high <= 1 else 1.0 if high <= MAX_8_BITS else 1 / 257
        return np.rint(values * scale).astype(np.uint8)
    return (values if high <= MAX_8_BITS else values // 257).astype(np.uint8)
