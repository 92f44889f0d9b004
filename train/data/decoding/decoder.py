"""Image files to bytes: the one decoder of the stream, the cache and evaluation.

Plain JPEGs go to the compiled kernel where there is one, everything else to Pillow. The kernel reads, crops and resizes
a JPEG in one sweep, without Python's lock. The set-up compiles `kernels/jpeg.cpp` against the libjpeg of the installed
Pillow, so both decode to the same bytes. Without a compiler or libjpeg's headers there is no kernel: Pillow does the
same more slowly. As a program this module compares a kernel with Pillow, for the set-up.
"""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from entrypoint.core.errors import UserError, first_line
from train.data.decoding.pixel_values import convert_to_visible, open_with_pillow, orientation_of
from train.data.sources.image_file import FILE_PROBLEMS, ImageFile, read_file
from train.data.sources.image_list import UnreadableImage
from train.kernels.library import load_kernel
from train.settings import ImageShape
from train.transforms.image_part import ORIENTATIONS, PLAIN_VIEW, UPRIGHT, ImagePart, Pixels, View, arrange, find_part

Header = ctypes.c_int * 4
Region = ctypes.c_int * 4
FloatBox = ctypes.c_float * 4


class JpegKernel:
    """The functions of the compiled library; each thread has its own decoder inside."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self.open_file, self.decode_part = library.jpeg_kernel_open, library.jpeg_kernel_decode
        self.open_file.argtypes = (ctypes.c_char_p, ctypes.c_size_t, Header)
        size = (ctypes.c_int, ctypes.c_int, ctypes.c_int)
        self.decode_part.argtypes = (ctypes.c_int, Region, FloatBox, *size, ctypes.c_void_p, ctypes.c_void_p)

    def decode(self, data: bytes, target: Pixels, view: View = PLAIN_VIEW) -> bool:
        """Decode a JPEG into contiguous (height, width, channels) bytes; return whether the kernel could.

        False means that nothing is written, or only a part: then it is Pillow's turn.
        """
        height, width, channels = target.shape
        header = Header()
        if self.open_file(data, len(data), header):
            return False
        *stored, exif_segments, is_gray = header
        orientation = exif_orientation(data) if exif_segments else UPRIGHT
        if orientation not in ORIENTATIONS or (channels == 1 and not is_gray):
            return False
        part = find_part((stored[0], stored[1]), (width, height), view, orientation, scalable=True)
        region, box = Region(*part.region), FloatBox(*part.box)
        upright = orientation == UPRIGHT
        direct = upright and view.rows is None
        decoded = target if direct else np.empty((*part.output[::-1], channels), np.uint8)
        columns = view.columns.ctypes.data if upright and view.columns is not None else None
        if self.decode_part(part.scale, region, box, *part.output, channels, columns, decoded.ctypes.data):
            return False
        if not upright:
            target[:] = arrange(decoded, orientation, view)
        elif view.rows is not None:
            np.take(decoded, view.rows, axis=0, out=target, mode="clip")  # without a mode it copies once more
        return True


def exif_orientation(data: bytes) -> int:
    """Return the EXIF orientation of a JPEG as Pillow reads it, 0 if it cannot."""
    try:
        with open_with_pillow(BytesIO(data)) as image:
            return orientation_of(image)
    except Exception:  # Pillow raises what its parser meets: SyntaxError, struct.error, ValueError
        return 0


@cache
def jpeg_kernel() -> JpegKernel | None:
    """Return the compiled decoder, None if there is none for the installed Pillow."""
    return load_kernel("jpeg", JpegKernel)


JPEG_START = b"\xff\xd8\xff"
# Pillow's formats whose pixels libjpeg decodes. MPO are the photos of phones, with several JPEGs in a file.
JPEG_FORMATS = frozenset({"JPEG", "MPO"})


def read_image(path: ImageFile, shape: ImageShape, view: View = PLAIN_VIEW) -> Pixels | UnreadableImage:
    """Return an image as (height, width, channels) bytes; `shape` is (channels, height, width)."""
    channels, height, width = shape
    target = np.empty((height, width, channels), dtype=np.uint8)
    return read_into(path, target, view) or target


def read_into(path: ImageFile, target: Pixels, view: View = PLAIN_VIEW) -> UnreadableImage | None:
    """Read an image into contiguous (height, width, channels) bytes, cropped and scaled to their size.

    An unreadable image is returned; raises `MemoryError` if memory is short.
    """
    try:
        decode_image(read_file(path), target, view)
    except Exception as error:  # Pillow's plug-ins raise what their parsers meet: OSError, SyntaxError, struct.error
        return unreadable_image(path, error)
    return None


def unreadable_image(path: ImageFile, error: Exception) -> UnreadableImage:
    """Return a file with the reason why it could not be read; raises a `MemoryError` again: the file may be good."""
    if isinstance(error, MemoryError):
        raise error
    return UnreadableImage(path, failure_reason(error))


def decode_image(data: bytes, target: Pixels, view: View = PLAIN_VIEW) -> None:
    """Decode a file's content into the target, (height, width, channels) bytes.

    Raises whatever Pillow raises for a file that it cannot read.
    """
    kernel = jpeg_kernel()
    if not (kernel and data.startswith(JPEG_START) and kernel.decode(data, target, view)):
        target[:] = decode_with_pillow(BytesIO(data), target.shape, view)


def decode_with_pillow(file: BytesIO, size: tuple[int, ...], view: View = PLAIN_VIEW) -> Pixels:
    """Return the (height, width, channels) bytes of an image."""
    height, width, channels = size
    output, orientation = (width, height), UPRIGHT
    with open_with_pillow(file) as image:
        is_jpeg = image.format in JPEG_FORMATS
        if is_jpeg:
            orientation = orientation_of(image)
        else:
            image.load()  # Pillow's TIFF plug-in turns the image itself here, and removes the tag
            ImageOps.exif_transpose(image, in_place=True)
        part = find_part(image.size, output, view, orientation, scalable=is_jpeg)
        if not reduce_decoding(image, part.scale):
            part = find_part(image.size, output, view, orientation, scalable=False)
        pixels = resize_part(convert_to_visible(image, channels), part)
    return arrange(pixels.reshape(*pixels.shape[:2], channels), orientation, view)


def reduce_decoding(image: Image.Image, scale: int) -> bool:
    """Have Pillow decode a JPEG at 1/scale, or any image whole at 1; return whether it will."""
    width, height = image.size
    if scale > 1:
        image.draft(None, (max(1, width // scale), max(1, height // scale)))
    return image.size == (-(-width // scale), -(-height // scale))


def resize_part(image: Image.Image, part: ImagePart) -> Pixels:
    """Return the part of an image resized, antialiased bilinear: rows first, then columns.

    Each step rounds to bytes. Why two: from version 13 on, Pillow itself chooses which of them comes first.
    """
    image, output = image.crop(part.region), part.output
    left, top, right, bottom = part.box
    image = image.resize((image.width, output[1]), Image.Resampling.BILINEAR, box=(0, top, image.width, bottom))
    return np.asarray(image.resize(output, Image.Resampling.BILINEAR, box=(left, 0, right, output[1])))


def failure_reason(error: Exception) -> str:
    """Return in a few words why a file could not be read as an image."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno)
    if str(error) in FILE_PROBLEMS:
        return str(error)
    return f"broken image ({first_line(error) or type(error).__name__})"


def check_kernel(path: Path) -> str:
    """Return how the library at a path differs from Pillow, empty if it decodes to the same bytes."""
    try:
        kernel = JpegKernel(path)
    except (OSError, AttributeError) as error:
        return f"it cannot be loaded ({error})"
    random = np.random.default_rng(0)
    for width, height, sampling in ((61, 47, 2), (200, 331, 1), (300, 200, 0), (640, 500, 2)):
        noise = random.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(noise.repeat(4, 0).repeat(4, 1)[:height, :width])
        image.save(file := BytesIO(), "JPEG", subsampling=sampling)
        for side in (32, 50, 224):
            found = np.zeros((side, side, 3), np.uint8)
            if not kernel.decode(file.getvalue(), found):
                return "it declines a plain JPEG"
            if not np.array_equal(found, decode_with_pillow(file, found.shape)):
                return f"its pixels differ from Pillow's at {width}x{height} to {side}x{side}"
    return ""


if __name__ == "__main__":
    sys.exit(check_kernel(Path(sys.argv[1])) or 0)
