"""Data sets by name."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
import torch

from entrypoint.core.errors import UserError
from tests.factories import train_settings, write_fashion_mnist
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
    settings = TrainSettings(dataset="synthetic", synthetic_images=60, synthetic_shape="2x5x7", synthetic_classes=4)
    data = load(settings, inspect_dataset(settings).shape, "memory", CREW)
    train, again = images(data.train), images(load(settings, (2, 5, 7), "memory", CREW).train)
    assert (tuple(train.images.shape), data.shape, len(data.classes)) == ((60, 5, 7, 2), (2, 5, 7), 4)
    assert len(images(data.test)) == 12
    assert torch.equal(train.images, again.images)
    other = load(msgspec.structs.replace(settings, seed=1), (2, 5, 7), "memory", CREW)
    assert not torch.equal(train.images, images(other.train).images)


def test_synthetic_classes_are_distinguishable() -> None:
    settings = TrainSettings(dataset="synthetic", synthetic_images=200)
    data = load(settings, (3, 32, 32), "memory", CREW)
    train, test = images(data.train), images(data.test)
    centres = torch.stack([train.images[train.labels == label].float().mean(0) for label in range(10)])
    distances = (test.images.float()[:, None] - centres[None]).flatten(2).norm(dim=2)
    assert torch.equal(distances.argmin(1), test.labels)


def test_fashion_mnist_is_read_from_data_dir(tmp_path: Path) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    write_fashion_mnist(tmp_path, 30, 20)
    settings = TrainSettings(dataset="fashion-mnist", data_dir=tmp_path, download=False)
    data = load(settings, (1, 28, 28), "memory", CREW)
    assert tuple(images(data.train).images.shape) == (30, 28, 28, 1)
    assert len(images(data.test)) == 20
    assert data.classes[0] == "T-shirt/top"


@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_missing_data_without_download_raises(tmp_path: Path, name: str) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    settings = train_settings({"dataset": name, "data_dir": tmp_path, "download": False})
    with pytest.raises(
        UserError, match=rf"TRAIN_DATASET={name}: not in {tmp_path}, or damaged, and TRAIN_DOWNLOAD=0"
    ) as error:
        load(settings, inspect_dataset(settings).shape, "memory", CREW)
    assert len(str(error.value).splitlines()) == 1
