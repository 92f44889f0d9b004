"""The compiled JPEG decoder: reads, crops and resizes a JPEG in one sweep, without Python's lock.

The set-up compiles `kernels/jpeg.cpp` against the libjpeg of the installed Pillow, so both decode to the same bytes.
Without a compiler or libjpeg's headers there is no kernel, and Pillow does the same more slowly.
"""

from __future__ import annotations

import ctypes
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np

from train.data.decoding.formats import open_with_pillow
from train.data.decoding.pixel_values import orientation_of
from train.kernels.library import load_kernel
from train.transforms.image_part import ORIENTATIONS, PLAIN_VIEW, UPRIGHT, Pixels, View, arrange, find_part

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
