"""Tar shards in webdataset's form, whole ones and others."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from tests.factories import train_settings
from train.data.sources.image_list import ImageList
from train.data.sources.shards import list_shard_splits
from train.settings import TrainSettings

Member = tuple[str, bytes]


def write_tar(path: Path, members: Sequence[Member], kind: int = tarfile.DEFAULT_FORMAT, mtime: float = 0) -> Path:
    """Write a tar of files with these names and contents, as webdataset's TarWriter does with a time to a fraction."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, tarfile.open(fileobj=file, mode="w|", format=kind) as archive:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size, header.mode, header.uname, header.gname = len(content), 0o444, "bigdata", "bigdata"
            header.mtime = mtime if kind == tarfile.PAX_FORMAT else int(mtime)
            archive.addfile(header, BytesIO(content))
    return path


def image_bytes(color: int = 0, kind: str = "JPEG") -> bytes:
    """Return a small image file of one color."""
    Image.new("RGB", (16, 16), (color, 255 - color, 0)).save(file := BytesIO(), kind)
    return file.getvalue()


def samples(labels: Sequence[int], first: int = 0) -> list[Member]:
    """Return the members of a JPEG and a label for each of the labels."""
    return [
        member
        for index, label in enumerate(labels, first)
        for member in ((f"{index:06}.jpg", image_bytes(index % 256)), (f"{index:06}.cls", str(label).encode()))
    ]


def pack(folder: Path, target: Path, per_shard: int = 10, label_ending: str = "cls") -> Path:
    """Pack an image folder into shards below `target`, in order, with the names of its classes."""
    classes = sorted(entry.name for entry in (folder / "train").iterdir())
    for split in sorted(entry.name for entry in folder.iterdir() if entry.is_dir()):
        paths = [path for name in classes for path in sorted((folder / split / name).iterdir())]
        for start in range(0, len(paths), per_shard):
            members: list[Member] = []
            for number, path in enumerate(paths[start : start + per_shard], start):
                label = classes.index(path.parent.name)
                text = str(label) if label_ending == "cls" else json.dumps({"label": label})
                members += [(f"{number:06}{path.suffix}", path.read_bytes())]
                members += [(f"{number:06}.{label_ending}", text.encode())]
            write_tar(target / split / f"{split}-{start // per_shard:06}.tar", members)
    (target / "classes.txt").write_text("".join(f"{name}\n" for name in classes))
    return target


def pack_lists(folder: Path, target: Path, task: str) -> Path:
    """Pack the images of train.csv, test.csv and val.csv, with labels or numbers, in order into a shard of each."""
    for path in sorted(folder.glob("*.csv")):
        members: list[Member] = []
        with path.open() as file:
            rows = list(csv.DictReader(file))
        for number, row in enumerate(rows):
            name = row.pop("file")
            if task == "multilabel":
                fields = {"labels": [label.strip() for label in row["label"].split("|") if label.strip()]}
            else:
                fields = {"targets": list(map(float, row.values()))}
            members += [(f"{number:06}{Path(name).suffix}", (folder / name).read_bytes())]
            members += [(f"{number:06}.json", json.dumps(fields).encode())]
        write_tar(target / f"{path.stem}-0.tar", members)
        if task == "regress":
            (target / "classes.txt").write_text("\n".join(rows[0]))
    return target


def settings_for(folder: Path | None, **more: object) -> TrainSettings:
    """Return the settings that read shards, with a cache next to their folder."""
    cache = folder.parent / "cache" if folder else None
    return train_settings({"dataset": "shards", "data_dir": folder, "cache_dir": cache, **more})


def list_both(folder: Path) -> tuple[ImageList, ImageList]:
    """Return train and test, with a cache next to their folder."""
    return list_shard_splits(folder, folder.parent / "cache")
