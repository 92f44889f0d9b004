"""JPEG folders that the benchmark makes itself, and the shards of the loaders that need some."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = 4
# Width, height, training images, test images, and quality: 60 to 130 KB at 500x375.
SETS = {"500x375": (500, 375, 768, 256, 95), "96x96": (96, 96, 4096, 1024, 90)}


def photo(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Return an image whose contrast falls with the size of its detail, as in photos, with less detail in color."""
    pixels = np.full((height, width, 3), 128.0)
    for cell, contrast in ((64, 45), (16, 22), (4, 11), (2, 7), (1, 3)):
        size = height // cell + 2, width // cell + 2
        gray, color = random.normal(0, contrast, (*size, 1)), random.normal(0, contrast / 4, (*size, 3))
        channels = [
            Image.fromarray(layer.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR)
            for layer in np.moveaxis(gray + color, 2, 0)
        ]
        pixels += np.stack([np.asarray(channel) for channel in channels], 2)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make_folder(folder: Path, name: str) -> Path:
    """Write a data set with `train/` and `test/` unless it is there; return its folder."""
    target = folder / name
    if target.exists():
        return target
    width, height, *counts, quality = SETS[name]
    unfinished = folder / f"{name}.tmp"
    shutil.rmtree(unfinished, ignore_errors=True)
    random = np.random.default_rng(0)
    for split, count in zip(("train", "test"), counts, strict=True):
        for index in range(count):
            path = unfinished / split / f"class{index % CLASSES}" / f"{index:05}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            photo(random, width, height).save(path, quality=quality)
    return unfinished.rename(target)


def make_tar_shards(data: Path, split: str, shards: int = 4) -> list[str]:
    """Write a split as tar shards as webdataset reads them; return their paths."""
    folder = data / f"tar-{split}"
    folder.mkdir(exist_ok=True)
    files = sorted((data / split).glob("*/*.jpg"))
    paths = [folder / f"{shard:02}.tar" for shard in range(shards)]
    for shard, path in enumerate(paths):
        if path.exists():
            continue
        with tarfile.open(path.with_suffix(".tmp"), "w") as tar:
            for file in files[shard::shards]:
                tar.add(file, f"{file.stem}.jpg")
        path.with_suffix(".tmp").rename(path)
    return [str(path) for path in paths]


def make_mds(data: Path, split: str) -> Path:
    """Write a split in the format of MosaicML's streaming; return its folder."""
    from streaming import MDSWriter

    folder = data / f"mds-{split}"
    if not folder.exists():
        with MDSWriter(out=str(folder), columns={"image": "jpeg_array"} | {"image": "bytes"}) as out:
            for file in sorted((data / split).glob("*/*.jpg")):
                out.write({"image": file.read_bytes()})
    return folder
