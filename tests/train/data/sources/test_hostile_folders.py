"""A folder with an odd entry ends in one line, or trains without the entry and counts it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, paint, refusal
from tests.factories import train_settings
from tests.train.given import imagefolder
from train.data.dataset_info import inspect_dataset
from train.data.datasets import ImageTensors, load
from train.data.feeds.loader import BatchLoader, ImageDataset
from train.data.feeds.stream import StreamSource
from train.data.sources.image_folder import list_splits
from train.data.sources.image_list import ImageList
from train.data.workers import WorkerSpec
from train.distributed.process_group import ProcessGroup
from train.settings import TrainSettings

FORGED = "entrypoint: error: forged"
POOL = WorkerSpec(frozenset({0}), 1)
ALONE = ProcessGroup(0, 1, 0, torch.device("cpu"))
# Images of the folder without the odd entry: train and test.
COUNTS = {"train": 24, "test": 12}


def write_image(path: Path, kind: str, *, whole: bool) -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path, kind)
    if not whole:
        path.write_bytes(path.read_bytes()[:300])


def write_long_text(path: Path) -> None:
    info = PngInfo()
    info.add_text("c", "x" * (3 << 20), zip=True)
    Image.new("RGB", (16, 16)).save(path, "PNG", pnginfo=info)


def write_hostile_eps(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 \x1b[31m 9\n%%EndComments\n")


def write_socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def write_named(path: Path, name: bytes) -> None:
    Path(os.fsdecode(os.fsencode(path.parent) + b"/" + name)).write_text("no image")


def write_values(path: Path, values: object) -> None:
    Image.fromarray(np.asarray(values)).save(path, "TIFF")


KINDS: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("no image"),
    "truncated PNG": lambda path: write_image(path, "PNG", whole=False),
    "truncated JPEG": lambda path: write_image(path, "JPEG", whole=False),
    "400 megapixels": lambda path: Image.new("1", (20_000, 20_000)).save(path, "PNG"),
    "long text chunk": write_long_text,
    "hostile EPS": write_hostile_eps,
    "pipe": os.mkfifo,
    "socket": write_socket,
    "link to a device": lambda path: path.symlink_to("/dev/zero"),
    "link to nowhere": lambda path: path.symlink_to("/nowhere/x.png"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "link upward": lambda path: path.symlink_to(".."),
    "negative values": lambda path: write_values(path, np.full((16, 16), -1, np.int32)),
    "not a number": lambda path: write_values(path, np.full((16, 16), np.nan, np.float32)),
    "name with a line break": lambda path: write_named(path, f"0\n{FORGED}.png".encode()),
    "name with an escape": lambda path: write_named(path, b"0\x1b[31mred\x1b]0;title\x07.png"),
    "name in no UTF-8": lambda path: write_named(path, b"0\xff\xfe.png"),
    "name from right to left": lambda path: write_named(path, "0\u202egnp.png".encode()),
}
# Each kind of entry with each policy and source, in one split or the other.
CASES = [
    (kind, ("train", "test")[number % 2], policy, source)
    for first, kind in enumerate(KINDS)
    for number, (policy, source) in enumerate(
        [("error", "memory"), ("error", "stream"), ("skip", "stream"), ("skip", "memory")], first
    )
]


def feed(settings: TrainSettings, source: str) -> tuple[dict[str, int], set[str]]:
    """Return how many images of each split are fed, and the entries that are left out."""
    data = load(settings, inspect_dataset(settings).shape, source, POOL)
    skipped = set(data.skipped)
    if isinstance(data.train, ImageTensors) or isinstance(data.test, ImageTensors):
        return {"train": len(data.train), "test": len(data.test)}, skipped
    train, test = data.train, data.test
    assert isinstance(train, ImageList)
    with BatchLoader(ImageDataset((train, test), data.shape), WorkerSpec(POOL.cpus, 0), ALONE.device) as loader:
        stream = StreamSource(loader, settings, ALONE)
        batches = [part for batch in stream.train_batches(0) for part in batch.micro_batches]
        counts = {"train": good_images(batches), "test": good_images(list(stream.test_batches()))}
    return counts, skipped | stream.skipped


def good_images(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(int((labels >= 0).sum()) for _, labels in batches)


def check_line(line: str) -> None:
    """Check that a message forges no second line and no color."""
    assert line.isprintable(), ascii(line)


@pytest.mark.parametrize(("kind", "split", "policy", "source"), CASES)
def test_odd_entry_is_named_or_left_out(
    image_folder: Path, kind: str, split: str, policy: str, source: str, capfd: pytest.CaptureFixture[str]
) -> None:
    KINDS[kind](image_folder / split / "class0" / "000x.png")
    settings = train_settings(
        {
            **{"dataset": "imagefolder", "data_dir": image_folder, "on_unreadable_image": policy, "batch_size": 1},
            "cache_dir": image_folder.parent / "cache",
        }
    )
    if policy == "error":
        refusal(feed, settings, source, match=f"{split}/class0/0.*; repair or remove it")
    else:
        counts, skipped = feed(settings, source)
        assert counts == COUNTS
        (line,) = skipped
        check_line(line)
    for line in "".join(capfd.readouterr()).splitlines():
        check_line(line)
        assert line.startswith("train: skipped ")


SPOILED: dict[str, tuple[str, ...]] = {"one class": ("class1",), "every class": ("class0", "class1", "class2")}


@pytest.mark.parametrize("classes", SPOILED)
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("source", ["memory", "stream"])
def test_class_without_readable_image_is_refused(image_folder: Path, classes: str, split: str, source: str) -> None:
    for name in SPOILED[classes]:
        for path in (image_folder / split / name).iterdir():
            write_image(path, "PNG", whole=False)
    first = SPOILED[classes][0]
    settings = train_settings(
        {
            **{"dataset": "imagefolder", "data_dir": image_folder, "on_unreadable_image": "skip"},
            "cache_dir": image_folder.parent / "cache",
        }
    )
    cause = rf"{split}/{first}: the class has no images that can be read; {COUNTS[split] // 3} cannot, first /.*000"
    refusal(load, settings, (3, 16, 16), source, POOL, match=cause)


@pytest.mark.parametrize("name", [f"x\n{FORGED}", "x\x1b[31m", "x\udcff"])
def test_class_names_in_errors_are_escaped(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    paint(folder / "train")
    paint(folder / "test")
    settings = train_settings({"dataset": "imagefolder", "data_dir": folder})
    for target, source in (("train", "class2"), ("train", name), ("test", "class2")):
        if target == "train":
            (folder / target / source).rename(folder / target / (name if source == "class2" else "empty"))
        refusal(inspect_dataset, settings)
    for path in (folder / "train").iterdir():
        shutil.rmtree(path)
    refusal(inspect_dataset, settings, match="no class folders")
    (folder / "test").rename(folder / name)
    refusal(inspect_dataset, settings, match="it needs train/ and test/")


# Every kind of entry that differs on the way to the user, with split, policy and source by turns.
PROCESSES = [
    (kind, ("train", "test")[index // 2 % 2], ("error", "skip")[index % 2], ("memory", "stream")[index // 4 % 2])
    for index, kind in enumerate(
        (
            *("400 megapixels", "pipe", "socket", "link to a device", "hostile EPS", "name with a line break"),
            *("name with a line break", "name with an escape", "name with an escape", "name in no UTF-8"),
            *("link upward", "name in no UTF-8"),
        )
    )
]


@pytest.mark.slow_except("pipe-train")
@pytest.mark.launch
@pytest.mark.parametrize(("kind", "split", "policy", "source"), PROCESSES)
def test_odd_entry_in_a_real_run(
    entrypoint: Entrypoint, image_folder: Path, kind: str, split: str, policy: str, source: str
) -> None:
    KINDS[kind](image_folder / split / "class0" / "000x.png")
    given = {"TRAIN_ON_UNREADABLE_IMAGE": policy, "TRAIN_DATA_SOURCE": source, "LAUNCH_QUIET": "1"}
    result = entrypoint("train", env=imagefolder(image_folder, **given))
    for line in (result.out + result.err).splitlines():
        check_line(line)
        assert not line.startswith((FORGED, "Traceback"))
    if policy == "error":
        assert (result.code, len(result.err.splitlines())) == (ExitCode.USAGE, 1), result.err
        return
    assert result.code == 0, result.err
    assert entrypoint.summary()["images_skipped"] == 1
    assert "left out       1 unreadable image" in result.out
    (line,) = (entrypoint.folder / "runs/latest/skipped.txt").read_text().splitlines()
    assert escape(line) in (entrypoint.folder / "runs/latest/report.html").read_text()


@pytest.mark.launch
def test_streamed_summary_says_what_it_counted(entrypoint: Entrypoint, image_folder: Path) -> None:
    """One step of 8 images meets a few of the broken ones; a set in memory counts all of them."""
    for index in range(1, 8):
        (image_folder / f"train/class1/00{index}.png").write_text("no image")
        (image_folder / f"train/class2/00{index}.png").write_text("no image")
    given = {"TRAIN_ON_UNREADABLE_IMAGE": "skip", "TRAIN_EPOCHS": "1", "LAUNCH_QUIET": "1"}
    counts = {}
    for source, among in (
        ("memory", "images: skipped.txt\n"),
        ("stream", "images among those that this run read: skipped.txt\n"),
    ):
        result = entrypoint.succeed("train", env=imagefolder(image_folder, TRAIN_DATA_SOURCE=source, **given))
        counts[source] = entrypoint.summary()["images_skipped"]
        assert f"left out       {counts[source]} unreadable {among}" in result.out
    assert 0 < counts["stream"] <= counts["memory"]


@pytest.mark.launch
def test_classes_of_any_name_train(entrypoint: Entrypoint, tmp_path: Path) -> None:
    names = [f"a\n{FORGED}", "b\x1b[31m", "c\udcff"]
    for split in ("train", "test"):
        paint(tmp_path / split)
        for index, name in enumerate(names):
            (tmp_path / split / f"class{index}").rename(tmp_path / split / name)
    result = entrypoint.succeed("train", env=imagefolder(tmp_path, LAUNCH_QUIET="1"))
    for line in (result.out + result.err).splitlines():
        check_line(line)
    assert entrypoint.summary()["classes"] == names


@pytest.mark.seconds
def test_folder_of_any_depth_is_read(image_folder: Path) -> None:
    here = os.open(image_folder / "train/class0", os.O_RDONLY)
    for _ in range(1200):  # relative to open folders: the path becomes longer than the system takes
        os.mkdir("deep", dir_fd=here)
        inner = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        train, _ = list_splits(image_folder, "skip")
    finally:  # which Python's own rmtree cannot
        subprocess.run(["rm", "-r", image_folder / "train/class0/deep"], check=True)
    assert len(train) == 24
    assert [entry.reason for entry in train.unreadable] == ["cannot be listed (File name too long)"]


def test_names_that_look_alike_are_told_apart(image_folder: Path) -> None:
    for split, name in (("train", "caf\u00e9"), ("test", "cafe\u0301")):
        (image_folder / split / "class0").rename(image_folder / split / name)
    refusal(list_splits, image_folder, "error", match=r"'caf.+xe9' and 'cafe.+u0301' look alike but are two names")
