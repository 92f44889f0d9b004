"""Single image files, good and bad."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from train.data.decoding.decoder import UnreadableImage, read_image


def test_read_image_of_right_size_is_not_resampled(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "x.png")
    read = read_image(tmp_path / "x.png", (3, 5, 7))
    assert isinstance(read, np.ndarray)
    assert np.array_equal(read, pixels)


def test_read_image_wide_image_is_cropped(tmp_path: Path) -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = 255
    Image.fromarray(pixels).save(tmp_path / "x.png")
    read = read_image(tmp_path / "x.png", (3, 10, 10))
    assert isinstance(read, np.ndarray)
    assert read.min() == 255


def photo(path: Path, width: int, height: int) -> None:
    """Save a JPEG with detail of every size."""
    draw, pixels = np.random.default_rng(0), np.full((height, width, 3), 128.0)
    for cell, contrast in ((32, 60), (8, 30), (2, 15), (1, 6)):
        noise = draw.normal(0, contrast, (height // cell + 1, width // cell + 1, 3))
        pixels += noise.repeat(cell, 0).repeat(cell, 1)[:height, :width]
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def smooth_photo(seed: int, width: int, height: int) -> Image.Image:
    """Return an image whose contrast falls with the size of its detail, as in photos."""
    draw, pixels = np.random.default_rng(seed), np.full((height, width), 128.0)
    for cell, contrast in ((64, 45), (16, 22), (4, 11), (2, 7), (1, 3)):
        noise = draw.normal(0, contrast, (height // cell + 2, width // cell + 2)).astype(np.float32)
        pixels += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BILINEAR))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB")


@pytest.mark.parametrize(
    ("size", "reduced"),
    [((64, 64), False), ((300, 255), False), ((256, 256), True), ((600, 400), True), ((1600, 1200), True)],
)
def test_read_image_large_photo_uses_reduced_decoding(tmp_path: Path, size: tuple[int, int], reduced: bool) -> None:
    photo(tmp_path / "x.jpg", *size)
    read = read_image(tmp_path / "x.jpg", (3, 64, 64))
    with Image.open(tmp_path / "x.jpg") as whole:
        expected = np.array(ImageOps.fit(whole, (64, 64), method=Image.Resampling.BILINEAR))
    assert isinstance(read, np.ndarray)
    difference = np.abs(read.astype(int) - expected)
    assert (difference.max() <= 1) is not reduced  # two roundings, in another order than Pillow's
    assert difference.mean() < 1.5  # much detail of one pixel


def test_reduced_photos_look_like_whole_ones(tmp_path: Path) -> None:
    """Smooth photos at odd sizes: the mean difference over all of them is below 0.3 of 255."""
    means = []
    for index, (width, height) in enumerate([(500, 375), (501, 375), (499, 333), (333, 517), (1203, 901)]):
        path = tmp_path / f"{index}.jpg"
        smooth_photo(index, width, height).save(path, quality=92)
        for side in (32, 64):
            with Image.open(path) as whole:
                expected = np.array(ImageOps.fit(whole, (side, side), method=Image.Resampling.BILINEAR))
            read = read_image(path, (3, side, side))
            assert isinstance(read, np.ndarray)
            means.append(np.abs(read.astype(int) - expected).mean())
    assert np.mean(means) < 0.3, means


def spoil(path: Path, how: str) -> None:
    Image.new("RGB", (64, 64), (1, 2, 3)).save(path)
    whole = path.read_bytes()
    match how:
        case "truncated":
            path.write_bytes(whole[: len(whole) // 2])
        case "text":
            path.write_text("no image")
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()


@pytest.mark.parametrize("suffix", ["jpg", "png", "gif", "webp", "bmp"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("truncated", "broken image|not an image"),
        ("text", "not an image"),
        ("empty", "empty file"),
        ("missing", "No such"),
    ],
)
def test_read_image_bad_file_returns_reason(tmp_path: Path, suffix: str, how: str, said: str) -> None:
    path = tmp_path / f"x.{suffix}"
    spoil(path, how)
    read = read_image(path, (3, 64, 64))
    assert isinstance(read, UnreadableImage)
    assert str(read).startswith(f"{path}: ")
    assert any(part in read.reason for part in said.split("|"))
