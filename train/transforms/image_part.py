"""Which part of an image file becomes which output: crop, decoding scale and orientation, as plain geometry.

Sizes are (width, height), as in Pillow. Boxes are (left, top, right, bottom) and may have fractions.
A decoder and the resizing get the same numbers here, whatever library does them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Pixels = NDArray[np.uint8]
Size = tuple[int, int]
Box = tuple[float, float, float, float]
# Returns the box of an upright image of this size that becomes the output.
Crop = Callable[[Size], Box]


class View(NamedTuple):
    """What of an image is seen: a crop (None: the largest one in the middle), then its pixels in another order.

    `rows` and `columns` say from which row and column of the output each pixel comes, None for its own.
    """

    crop: Crop | None = None
    rows: NDArray[np.intc] | None = None
    columns: NDArray[np.intc] | None = None


PLAIN_VIEW = View()
# libjpeg decodes at a half, a quarter or an eighth in less time. Its other scales take longer than the whole image.
SCALES = (8, 4, 2)
# The decoded part stays so many times as large as the output. Scaling down averages the missing detail away.
MIN_OVERSAMPLING = 2
# EXIF 2.3, tag 0x0112: whether rows and columns are swapped, then the columns are reversed, then the rows.
ORIENTATIONS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
UPRIGHT = 1


class ImagePart(NamedTuple):
    """How to make the output from a file: decode at 1/scale, cut the region out, and resize the box inside it.

    `output` is the size of what comes out, before `arrange` turns it upright.
    """

    scale: int
    region: tuple[int, int, int, int]
    box: Box
    output: Size


def fit_crop(output: Size) -> Crop:
    """Return the crop that is the largest box in the middle with the aspect of the output, as `ImageOps.fit`."""

    def crop(size: Size) -> Box:
        (width, height), aspect = size, output[0] / output[1]
        across, down = float(width), float(height)
        if width * output[1] > height * output[0]:
            across = aspect * height
        elif width * output[1] < height * output[0]:
            down = width / aspect
        left, top = (width - across) / 2, (height - down) / 2
        return left, top, left + across, top + down

    return crop


def swaps_sides(orientation: int) -> bool:
    """Return whether an EXIF orientation swaps width and height."""
    return ORIENTATIONS[orientation][0]


def find_part(stored: Size, output: Size, view: View, orientation: int = UPRIGHT, *, scalable: bool) -> ImagePart:
    """Return the part of a file's pixels, as they are stored, that becomes an output of this size.

    `output` and the view are upright. `scalable` is for JPEGs.
    """
    swapped = swaps_sides(orientation)
    visible = stored[::-1] if swapped else stored
    box = stored_box((view.crop or fit_crop(output))(visible), visible, orientation)
    width, height = output[::-1] if swapped else output
    scale = 1
    if scalable:
        room = min((box[2] - box[0]) / width, (box[3] - box[1]) / height) / MIN_OVERSAMPLING
        scale = next((one for one in SCALES if one <= room), 1)
    left, right, box_left, box_right = decoded_range(box[0], box[2], stored[0], scale, width)
    top, bottom, box_top, box_bottom = decoded_range(box[1], box[3], stored[1], scale, height)
    return ImagePart(scale, (left, top, right, bottom), (box_left, box_top, box_right, box_bottom), (width, height))


def decoded_range(low: float, high: float, size: int, scale: int, output: int) -> tuple[int, int, float, float]:
    """Return along one axis the decoded pixels that are needed, as first and last, and the range inside them."""
    decoded = -(-size // scale)
    low, high = low / scale, min(high / scale, decoded)
    reach = max(1.0, (high - low) / output) + 1  # the filter's width, and one for rounding
    first, last = max(0, math.floor(low - reach)), min(decoded, math.ceil(high + reach))
    return first, last, low - first, high - first


def stored_box(box: Box, visible: Size, orientation: int) -> Box:
    """Return the box of an upright image of the size `visible` as a box of the pixels as they are stored."""
    swapped, columns_reversed, rows_reversed = ORIENTATIONS[orientation]
    left, top, right, bottom = box
    if columns_reversed:
        left, right = visible[0] - right, visible[0] - left
    if rows_reversed:
        top, bottom = visible[1] - bottom, visible[1] - top
    return (top, left, bottom, right) if swapped else (left, top, right, bottom)


def arrange(pixels: Pixels, orientation: int, view: View) -> Pixels:
    """Return (height, width, channels) pixels as they are stored upright, and in the order of the view."""
    swapped, columns_reversed, rows_reversed = ORIENTATIONS[orientation]
    pixels = pixels.swapaxes(0, 1) if swapped else pixels
    pixels = pixels[:: -1 if rows_reversed else 1, :: -1 if columns_reversed else 1]
    pixels = pixels if view.rows is None else pixels[view.rows]
    return pixels if view.columns is None else pixels[:, view.columns]
