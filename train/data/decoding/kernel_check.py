"""Program of the set-up: whether a compiled JPEG decoder gives Pillow's bytes."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.decoding.decoder import JpegKernel, decode_with_pillow


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
