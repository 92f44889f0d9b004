"""JPEG files of every kind, and damaged ones, for the compiled decoder."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

from train.data.decoding.decoder import JpegKernel, decode_with_pillow
from train.transforms.image_part import PLAIN_VIEW, Box, Pixels, Size, View

# All of an image, of any aspect.
WHOLE = View(lambda size: (0.0, 0.0, float(size[0]), float(size[1])))
# Options of Pillow's encoder.
KINDS: dict[str, dict[str, object]] = {
    "4:4:4": {"subsampling": 0},
    "4:2:2": {"subsampling": 1},
    "4:2:0": {"subsampling": 2},
    "progressive": {"progressive": True, "subsampling": 2},
    "restart markers": {"restart_marker_blocks": 3, "subsampling": 2},
    "low quality": {"quality": 20},
    "keeps RGB": {"keep_rgb": True},
}


def image_of(draw: random.Random, width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Return an image with detail of every size."""
    numbers, pixels = np.random.default_rng(draw.randrange(2**32)), np.full((height, width, 3), 128.0)
    for cell, contrast in ((32, 60), (8, 30), (2, 15), (1, 6)):
        noise = numbers.normal(0, contrast, (height // cell + 1, width // cell + 1, 3))
        pixels += noise.repeat(cell, 0).repeat(cell, 1)[:height, :width]
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def jpeg(image: Image.Image, **options: object) -> bytes:
    """Return an image as a JPEG."""
    image.save(file := BytesIO(), "JPEG", **options)
    return file.getvalue()


def random_view(draw: random.Random, output: Size) -> View:
    """Return a crop of any place and size, and of fractions of pixels; sometimes the pixels in another order."""
    left, top, across, down = (draw.random() for _ in range(4))

    def crop(size: Size) -> Box:
        width, height = max(1.0, across * size[0]), max(1.0, down * size[1])
        x, y = left * (size[0] - width), top * (size[1] - height)
        return x, y, x + width, y + height

    columns, rows = (np.array(draw.choices(range(side), k=side), dtype=np.intc) for side in output)
    return View(crop, rows if draw.random() < 0.3 else None, columns if draw.random() < 0.5 else None)


def damaged(draw: random.Random, data: bytes) -> bytes:
    """Return a file that is cut, or has bytes changed, removed or doubled."""
    content = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(2, len(content))
        match draw.randrange(5):
            case 0:
                del content[place:]
            case 1:
                content[place] = draw.randrange(256)
            case 2:
                del content[place : place + draw.randint(1, 50)]
            case 3:
                content[place:place] = content[place : place + draw.randint(1, 50)]
            case _:
                content[place : place + 2] = bytes((0xFF, draw.randrange(0xC0, 256)))
        if len(content) < 4:
            break
    return bytes(content)


def random_files(seed: int, count: int) -> Iterator[bytes]:
    """Yield damaged files of every kind."""
    draw = random.Random(seed)
    kinds = list(KINDS.values())
    for index in range(count):
        size = draw.randint(1, 200), draw.randint(1, 200)
        image = image_of(draw, *size, mode=draw.choice(["RGB", "RGB", "RGB", "L", "CMYK"]))
        options = dict(kinds[index % len(kinds)])
        if image.mode != "RGB":
            options.pop("keep_rgb", None)
        exif = Image.Exif()
        exif[0x0112] = draw.randint(1, 9)
        yield damaged(draw, jpeg(image, **options, exif=exif))


def compare(kernel: JpegKernel, data: bytes, size: Size, view: View = PLAIN_VIEW) -> str:
    """Return `declined`, `equal`, or what differs between the kernel and Pillow."""
    found: Pixels = np.zeros((size[1], size[0], 3), np.uint8)
    if not kernel.decode(data, found, view):
        return "declined"
    try:
        expected = decode_with_pillow(BytesIO(data), found.shape, view)
    except Exception as error:  # Pillow raises what its parsers meet
        return f"Pillow refuses it: {error}"
    return "equal" if np.array_equal(found, expected) else "other pixels"


def main(path: str, seed: int, count: int) -> None:
    """Decode damaged files with the library at a path, and print how often each result came."""
    kernel, results = JpegKernel(Path(path)), dict.fromkeys(("declined", "equal"), 0)
    for data in random_files(seed, count):
        result = compare(kernel, data, (40, 30), WHOLE)
        results[result] = results.get(result, 0) + 1
    print(results)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
