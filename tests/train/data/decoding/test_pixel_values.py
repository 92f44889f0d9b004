"""Every pixel format becomes what a viewer shows, checked against other decoders than Pillow."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.factories import train_settings
from train.data.cache.fingerprint import digest_of_file
from train.data.dataset_info import inspect_dataset
from train.data.decoding.decoder import failure_reason, read_image
from train.data.sources.image_file import open_image
from train.data.sources.image_list import UnreadableImage
from train.data.workers import WorkerSpec

SIDE = 32
RAMP = np.tile(np.linspace(0, 65535, SIDE).astype(np.uint16), (SIDE, 1))
POOL = WorkerSpec(frozenset({0}), 1)
Values = NDArray[np.generic]


def colors() -> NDArray[np.uint8]:
    """Return an RGB image whose four corners differ."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE]
    return np.stack([rows * 8, columns * 8, 255 - rows * 4], axis=2).astype(np.uint8)


def save(values: Values, path: Path) -> Path:
    Image.fromarray(values).save(path)
    return path


def big_endian(path: Path) -> Path:
    Image.frombytes("I;16B", (SIDE, SIDE), RAMP.astype(">u2").tobytes()).save(path)
    return path


# What writes a file, and the bytes that it becomes.
TIFFS: dict[str, tuple[Callable[[Path], Path], Values]] = {
    "16-bit": (lambda path: save(RAMP, path), RAMP // 257),
    "16-bit, big-endian": (big_endian, RAMP // 257),
    "32-bit, values of 16": (lambda path: save(RAMP.astype(np.int32), path), RAMP // 257),
    "32-bit, values of 8": (lambda path: save((RAMP // 257).astype(np.int32), path), RAMP // 257),
    "float, 0 to 1": (lambda path: save((RAMP / 65535).astype(np.float32), path), np.rint(RAMP / 257)),
    "float, 0 to 255": (lambda path: save((RAMP // 257).astype(np.float32), path), RAMP // 257),
    "float, 0 to 65535": (lambda path: save(RAMP.astype(np.float32), path), np.rint(RAMP / 257)),
}


@pytest.mark.parametrize("name", TIFFS)
@pytest.mark.parametrize("channels", [1, 3])
def test_gray_tiff_of_pillow_has_the_values_that_it_was_given(tmp_path: Path, name: str, channels: int) -> None:
    write, right = TIFFS[name]
    found = read_image(write(tmp_path / "x.tif"), (channels, SIDE, SIDE))
    assert not isinstance(found, UnreadableImage), found
    assert np.array_equal(found, np.repeat(right[:, :, None], channels, axis=2))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.full((4, 4), -1, np.int32), "values from -1 to -1: the range is unknown"),
        (np.full((4, 4), 70_000, np.int32), "values from 70000 to 70000"),
        (np.full((4, 4), np.nan, np.float32), "values from nan to nan"),
        (np.full((4, 4), -0.5, np.float32), "values from -0.5 to -0.5"),
    ],
)
def test_values_of_unknown_range_are_refused_by_name(tmp_path: Path, values: Values, reason: str) -> None:
    found = read_image(save(values, tmp_path / "x.tif"), (1, 4, 4))
    assert isinstance(found, UnreadableImage)
    assert reason in str(found)


def write_tiff(path: Path, values: Values, bits: int, photometric: int) -> Path:
    """Write one uncompressed strip with the tags of TIFF 6.0 that a gray image needs."""
    data = values.tobytes()
    if bits == 12:
        left, right = values.astype(np.uint32).reshape(-1, 2).T
        data = np.stack([left >> 4, (left & 15) << 4 | right >> 8, right & 255], 1).astype(np.uint8).tobytes()
    kind = 3 if values.dtype.kind == "f" else 1
    height, width = values.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: height, 279: len(data),
            339: kind}  # fmt: skip
    fields = b"".join(struct.pack("<HHIHH", tag, 3, 1, value, 0) for tag, value in tags.items())
    path.write_bytes(
        b"II" + struct.pack("<HI", 42, 8 + len(data)) + data + struct.pack("<H", len(tags)) + fields + bytes(4)
    )
    return path


TWELVE = (RAMP // 16).astype(np.uint16)
# Bits and values of a file, and the bytes that it becomes where 0 is black.
DEPTHS = {
    "8-bit": (8, (RAMP // 257).astype(np.uint8), RAMP // 257),
    "12-bit": (12, TWELVE, TWELVE.astype(np.uint32) * 255 // 4095),
    "16-bit": (16, RAMP, RAMP // 257),
    "float": (32, (RAMP / 65535).astype(np.float32), np.rint(RAMP / 257)),
}


@pytest.mark.parametrize("name", DEPTHS)
@pytest.mark.parametrize("white_is_zero", [False, True])
def test_tiff_of_each_depth_is_scaled_and_inverted(tmp_path: Path, name: str, white_is_zero: bool) -> None:
    bits, values, right = DEPTHS[name]
    found = read_image(write_tiff(tmp_path / "x.tif", values, bits, int(not white_is_zero)), (1, SIDE, SIDE))
    if bits == 12 and white_is_zero:  # Pillow has no decoder for it
        assert str(found).endswith("not an image")
        return
    assert not isinstance(found, UnreadableImage), found
    assert np.array_equal(found[:, :, 0], 255 - right if white_is_zero else right)


def torchvision_decode(path: Path, mode: str) -> NDArray[np.int64]:
    """Return (height, width, channels) by torchvision's libpng and libjpeg, upright."""
    torchvision = pytest.importorskip("torchvision.io", exc_type=(ImportError, RuntimeError))
    image = torchvision.decode_image(
        torchvision.read_file(str(path)), mode=torchvision.ImageReadMode[mode], apply_exif_orientation=True
    )
    values: NDArray[np.int64] = image.to(dtype=image.dtype).numpy().astype(np.int64).transpose(1, 2, 0)
    return values


def png_files(folder: Path) -> dict[str, Path]:
    rgb = Image.fromarray(colors())
    alpha = Image.fromarray((np.mgrid[0:SIDE, 0:SIDE][0] * 8).astype(np.uint8))
    with_alpha = rgb.copy()
    with_alpha.putalpha(alpha)
    gray_alpha = Image.merge("LA", (rgb.convert("L"), alpha))
    palette = rgb.quantize(64)
    files = {
        "RGB": (rgb, {}),
        "L": (rgb.convert("L"), {}),
        "P": (palette, {}),
        "P with transparency": (palette, {"transparency": bytes(range(0, 256, 4))}),
        "P with a transparent color": (palette, {"transparency": 3}),
        "RGBA": (with_alpha, {}),
        "LA": (gray_alpha, {}),
        "RGB with a transparent color": (rgb, {"transparency": (0, 0, 255)}),
        "L with a transparent gray": (rgb.convert("L"), {"transparency": 29}),
    }
    for name, (image, more) in files.items():
        image.save(folder / f"{name}.png", **more)
    return {name: folder / f"{name}.png" for name in files}


@pytest.mark.parametrize("channels", [1, 3])
def test_png_of_each_mode_is_what_libpng_gives_on_white(tmp_path: Path, channels: int) -> None:
    for name, path in png_files(tmp_path).items():
        right = torchvision_decode(path, "RGB").astype(float)
        if "with a transparent" in name and name[0] != "P":  # torchvision ignores the transparent color
            color = (0, 0, 255) if name.startswith("RGB") else (29, 29, 29)
            assert (right == color).all(axis=2).any()
            right[(right == color).all(axis=2)] = 255
        elif name not in ("RGB", "L", "P"):
            rgba = torchvision_decode(path, "RGB_ALPHA")
            share = rgba[:, :, 3:] / 255
            right = rgba[:, :, :3] * share + 255 * (1 - share)
        if channels == 1:
            right = (right @ [0.299, 0.587, 0.114])[:, :, None]
        found = read_image(path, (channels, SIDE, SIDE))
        assert not isinstance(found, UnreadableImage), found
        assert np.abs(found - right).max() <= 1.5, name


def test_1_bit_png_is_what_libpng_gives(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    Image.fromarray(colors()).convert("1").save(path)
    found = read_image(path, (1, SIDE, SIDE))
    right = torchvision_decode(path, "GRAY")
    assert np.array_equal(found, right * 255 // right.max())  # torchvision does not expand 1 bit to 8


def test_16_bit_png_is_what_libpng_gives(tmp_path: Path) -> None:
    path = save(RAMP, tmp_path / "x.png")
    found = read_image(path, (1, SIDE, SIDE))
    right = torchvision_decode(path, "UNCHANGED") // 257
    assert not isinstance(found, UnreadableImage)
    assert np.array_equal(found, right)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_exif_orientation_turns_the_image(tmp_path: Path, orientation: int, suffix: str) -> None:
    wide = np.repeat(colors(), 2, axis=1)  # 32 x 64: sides that are swapped are seen
    exif = Image.Exif()
    exif[0x0112] = orientation
    more = {"jpg": {"quality": 100, "subsampling": 0}, "webp": {"lossless": True}}.get(suffix, {})
    Image.fromarray(wide).save(tmp_path / f"x.{suffix}", exif=exif, **more)
    # What EXIF 2.3 says of each value: where row 0 and column 0 of the file are.
    turned = {
        1: wide, 2: wide[:, ::-1], 3: wide[::-1, ::-1], 4: wide[::-1], 5: wide.swapaxes(0, 1),
        6: np.rot90(wide, -1), 7: wide[::-1, ::-1].swapaxes(0, 1), 8: np.rot90(wide, 1),
    }[orientation]  # fmt: skip
    height, width = turned.shape[:2]
    found = read_image(tmp_path / f"x.{suffix}", (3, height, width))
    assert not isinstance(found, UnreadableImage), found
    assert np.abs(found.astype(int) - turned).mean() < 2
    if suffix in ("jpg", "png"):
        right = torchvision_decode(tmp_path / f"x.{suffix}", "RGB")
        assert np.abs(found - right).mean() < 2


@pytest.mark.parametrize("mode", ["CMYK", "YCbCr", "LAB", "HSV", "La", "RGBa", "PA", "RGBX", "F", "I", "1"])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_mode_of_pillow_is_converted(mode: str, channels: int) -> None:
    from train.data.decoding.pixel_values import convert_to_visible

    gray = Image.fromarray(np.full((4, 4), 200, np.uint8))
    images = {
        "La": lambda: gray.convert("LA").convert("La"),
        "RGBa": lambda: gray.convert("RGBA").convert("RGBa"),
        "PA": lambda: gray.convert("P").convert("PA"),
        "LAB": lambda: Image.merge("LAB", [Image.new("L", (4, 4), value) for value in (206, 128, 128)]),
        "HSV": lambda: Image.merge("HSV", [Image.new("L", (4, 4), value) for value in (0, 0, 200)]),
    }
    image = images.get(mode, lambda: (gray if mode in ("F", "I", "1") else gray.convert("RGB")).convert(mode))()
    seen = np.asarray(convert_to_visible(image, channels))
    assert seen.shape == ((4, 4) if channels == 1 else (4, 4, 3))
    if mode != "1":  # which dithers
        assert np.abs(seen.astype(int) - 200).max() <= 2


def make_set(folder: Path, write: Callable[[int, Path], None], each: int = 3) -> Path:
    for split in ("train", "test"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
            for index in range(each):
                write(index, folder / split / name / f"{index}.png")
    return folder


RESIZED = "color, cropped to the shape and resized; half of 6 that were looked at are "
GRAY, COLOR = Image.new("L", (8, 8), 100), Image.new("RGB", (8, 8), (200, 10, 10))


@pytest.mark.parametrize(
    ("write", "channels"),
    [
        (lambda _, path: GRAY.save(path), 1),
        (lambda _, path: COLOR.save(path), 3),
        (lambda index, path: (COLOR if index else GRAY).save(path), 3),
        (lambda index, path: (COLOR if index == 2 else GRAY).save(path), 3),
        (lambda _, path: GRAY.convert("LA").save(path), 1),
        (lambda _, path: save(RAMP[:8, :8], path), 1),
    ],
    ids=["gray", "color", "gray first", "color last", "gray with transparency", "16-bit gray"],
)
def test_set_is_gray_only_if_every_image_looked_at_is(
    tmp_path: Path, write: Callable[[int, Path], None], channels: int
) -> None:
    folder = make_set(tmp_path / "set", write)
    assert inspect_dataset(train_settings(dataset="imagefolder", data_dir=folder)).shape == (channels, 8, 8)


@pytest.mark.seconds
def test_colored_class_of_a_large_gray_set_is_found(tmp_path: Path) -> None:
    folder = make_set(tmp_path / "set", lambda _, path: GRAY.save(path), 600)
    for path in (folder / "train/b").iterdir():
        if int(path.stem) >= 300:
            COLOR.save(path)
    assert inspect_dataset(train_settings(dataset="imagefolder", data_dir=folder)).shape == (3, 8, 8)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda _, path: GRAY.save(path), "gray"),
        (lambda _, path: save(RAMP[:8, :8], path), "gray; 12 and 16 bits scaled to 8"),
        (
            lambda _, path: save(RAMP[:8, :8].astype(np.int32), path.with_suffix(".tif")),
            "gray; 32 bits scaled to 8, per file, from 0 to 1 (floats), 255 or 65535, whichever holds its values",
        ),
        (lambda _, path: COLOR.convert("RGBA").save(path), "color; transparent parts white"),
        (lambda _, path: COLOR.resize((20, 10)).save(path, exif=bytes(TURNED)), "color; turned as EXIF says"),
        (lambda index, path: COLOR.resize((8 + index, 8)).save(path), f"{RESIZED}9x8 or larger"),
        (lambda _, path: COLOR.resize((300, 200)).save(path), f"{RESIZED}300x200 or larger"),
    ],
)
def test_plan_says_what_images_become(tmp_path: Path, write: Callable[[int, Path], None], said: str) -> None:
    folder = make_set(tmp_path / "set", write)
    assert inspect_dataset(train_settings(dataset="imagefolder", data_dir=folder)).becomes == said


TURNED = Image.Exif()
TURNED[0x0112] = 6
TURNED = TURNED.tobytes()


@pytest.mark.parametrize(("size", "said"), [(0, "empty file"), (3 << 30, "larger than 2 GiB")])
def test_file_of_no_sensible_size_is_not_read(tmp_path: Path, size: int, said: str) -> None:
    path = tmp_path / "a.jpg"
    path.touch()
    os.truncate(path, size)
    with pytest.raises(OSError, match=said) as caught:
        open_image(path)
    assert failure_reason(caught.value) == said
    assert digest_of_file(path) == said
