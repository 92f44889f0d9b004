"""Data sets by name, and the folders that they are kept in."""

from __future__ import annotations

import subprocess
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from PIL import Image

from entrypoint.core.errors import ExitCode
from tests.conftest import PYTHON, Entrypoint, paint, refusal
from tests.factories import train_settings, write_fashion_mnist
from tests.train.given import imagefolder
from train.data.dataset_info import inspect_dataset
from train.data.datasets import ImageTensors, load
from train.data.workers import WorkerSpec
from train.settings import TrainSettings

CREW = WorkerSpec(frozenset({0}), 1)


def images(split: object) -> ImageTensors:
    assert isinstance(split, ImageTensors)
    return split


# Of each split's pixels and labels. They are the bytes of scikit-learn 1.9.1's load_digits, scaled to 255 and split.
DIGITS = {
    "train": "ccc753b6f36e158e34470573746b2af9d0ec5083676a1b5fffc5436269ac945f",
    "test": "f17aaacec85782183c5d87db2c8fdfbb6feb7929e6c173d65eeba652e3a3925d",
}


def test_digits_are_scikit_learns_to_the_byte() -> None:
    data = load(TrainSettings(), (1, 8, 8), "memory", CREW)
    splits = {"train": images(data.train), "test": images(data.test)}
    assert sum(len(split) for split in splits.values()) == 1797
    content = {name: split.images.numpy().tobytes() + split.labels.numpy().tobytes() for name, split in splits.items()}
    assert {name: sha256(each).hexdigest() for name, each in content.items()} == DIGITS


def test_digits_every_fifth_of_a_class_is_test() -> None:
    data = load(TrainSettings(), (1, 8, 8), "memory", CREW)
    train, test = (torch.bincount(images(split).labels) for split in (data.train, data.test))
    assert test.tolist() == [int(count) // 5 for count in train + test]


def test_synthetic_data_has_any_shape_and_follows_the_seed() -> None:
    settings = TrainSettings().with_values(dataset="synthetic", synthetic_images=60, synthetic_shape="2x5x7")
    data = load(settings, inspect_dataset(settings).shape, "memory", CREW)
    train, again = images(data.train), images(load(settings, (2, 5, 7), "memory", CREW).train)
    assert (tuple(train.images.shape), data.shape, len(data.classes)) == ((60, 5, 7, 2), (2, 5, 7), 10)
    assert len(images(data.test)) == 12
    assert torch.equal(train.images, again.images)
    other = load(settings.with_values(seed=1), (2, 5, 7), "memory", CREW)
    assert not torch.equal(train.images, images(other.train).images)


def test_synthetic_classes_are_distinguishable() -> None:
    settings = TrainSettings().with_values(dataset="synthetic", synthetic_images=200)
    data = load(settings, (3, 32, 32), "memory", CREW)
    train, test = images(data.train), images(data.test)
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(10)])
    distances = (test.images.float()[:, None] - centres[None]).flatten(2).norm(dim=2)
    assert torch.equal(distances.argmin(1), test.labels)


@pytest.mark.usefixtures("torchvision")
def test_fashion_mnist_is_read_from_data_dir(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path, 30, 20)
    settings = TrainSettings().with_values(dataset="fashion-mnist", data_dir=tmp_path)
    data = load(settings, (1, 28, 28), "memory", CREW)
    assert tuple(images(data.train).images.shape) == (30, 28, 28, 1)
    assert len(images(data.test)) == 20
    assert data.classes[0] == "T-shirt/top"


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
@pytest.mark.usefixtures("torchvision")
def test_missing_data_without_a_network_raises(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:9")
    settings = train_settings({"dataset": name, "data_dir": tmp_path})
    refusal(
        load,
        settings,
        inspect_dataset(settings).shape,
        "memory",
        CREW,
        match=rf"TRAIN_DATASET={name}: not in {tmp_path} and cannot be fetched \(.+\); put the files there",
    )


def mounted(*commands: str) -> tuple[str, ...]:
    """Return a command that mounts something in a namespace of its own, then runs the entrypoint."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace (root)")
    script = " && ".join((*commands, 'exec "$@"'))
    return ("unshare", "-m", "sh", "-c", script, "sh", PYTHON, "-m", "entrypoint")


@pytest.mark.launch
@pytest.mark.usefixtures("torchvision")
def test_dataset_in_a_read_only_folder_trains(entrypoint: Entrypoint, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_fashion_mnist(data, 128, 64)
    read_only = mounted(f"mount --bind {data} {data}", f"mount -o remount,bind,ro {data}")
    env = {"TRAIN_DATASET": "fashion-mnist", "TRAIN_DATA_DIR": str(data)}
    entrypoint.succeed("train", env={**env, "TRAIN_EPOCHS": "1"}, command=read_only)
    assert entrypoint.summary()["test_images"] == 64
    assert not (data / ".download.lock").exists()


@pytest.mark.launch
def test_full_disk_of_the_image_cache_is_one_line(entrypoint: Entrypoint, tmp_path: Path) -> None:
    for split in ("train", "test"):
        paint(tmp_path / "images" / split, each=100, size=(64, 64))
    cache = tmp_path / "cache"
    cache.mkdir()
    small = mounted(f"mount -t tmpfs -o size=2m tmpfs {cache}")
    env = imagefolder(tmp_path / "images", TRAIN_CACHE_DIR=str(cache), LAUNCH_QUIET="1")
    result = entrypoint("train", env=env, command=small)
    assert result.code == ExitCode.USAGE, result.err
    (line,) = result.err.splitlines()
    assert line.startswith(f"entrypoint: error: {cache}/images-")
    assert line.endswith(": the image cache cannot be written (No space left on device); set TRAIN_CACHE_DIR")


def test_targets_that_say_nothing_are_known(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "c.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    (tmp_path / "train.csv").write_text("file,price,year\na.png,1,5\nb.png,2,5\n")
    (tmp_path / "test.csv").write_text("file,price,year\nc.png,3,5\n")
    fields = {"dataset": "csv", "task": "regress", "data_dir": tmp_path}
    facts = inspect_dataset(train_settings(**fields))
    assert (facts.constant, facts.same_targets) == (("year",), True)
    facts = inspect_dataset(train_settings(**fields, evaluate=str(tmp_path)))
    assert (facts.constant, facts.same_targets) == ((), True), "the one image has one year, of course"
    (tmp_path / "test.csv").write_text("file,price,year\nc.png,3,5\nb.png,2,5\n")
    assert not inspect_dataset(train_settings(**fields)).same_targets
