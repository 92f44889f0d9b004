"""Image files to bytes: the one decoder of the stream, the cache and evaluation.

Plain JPEGs go to the compiled kernel where there is one (`train.data.decoding.jpeg`), everything else to Pillow. Both
give the same bytes.
"""

from __future__ import annotations

import os
from io import BytesIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from entrypoint.core.errors import UserError, first_line
from train.data.decoding.formats import open_with_pillow
from train.data.decoding.jpeg import jpeg_kernel
from train.data.decoding.pixel_values import convert_to_visible, orientation_of
from train.data.sources.image_file import FILE_PROBLEMS, ImageFile, read_file
from train.data.sources.image_list import UnreadableImage
from train.settings import ImageShape
from train.transforms.image_part import PLAIN_VIEW, UPRIGHT, ImagePart, Pixels, View, arrange, find_part

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
