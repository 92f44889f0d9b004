"""Image folders as they are found, and what is said of those that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import paint
from tests.factories import train_settings
from train.data.dataset_info import DatasetInfo, inspect_dataset
from train.data.image_folder import list_splits
from train.settings import TrainSettings


def test_list_splits_returns_files_and_classes(image_folder: Path) -> None:
    train, test = list_splits(image_folder)
    assert train.classes == test.classes == ("class0", "class1", "class2")
    assert (len(train.files), len(test.files)) == (24, 12)
    assert train.labels == (0,) * 8 + (1,) * 8 + (2,) * 8


def test_list_splits_accepts_val_and_ignores_junk(image_folder: Path) -> None:
    (image_folder / "test").rename(image_folder / "val")
    (image_folder / "train/class0/.DS_Store").write_text("x")
    (image_folder / "train/class0/Thumbs.db").write_text("x")
    (image_folder / "train/.cache").mkdir()
    train, test = list_splits(image_folder)
    assert (len(train.files), len(test.files)) == (24, 12)


def test_list_splits_includes_subfolders(image_folder: Path) -> None:
    (image_folder / "train/class0/more").mkdir()
    (image_folder / "train/class0/000.jpg").rename(image_folder / "train/class0/more/000.jpg")
    assert len(list_splits(image_folder)[0].files) == 24


def break_folder(image_folder: Path, how: str) -> Path:
    match how:
        case "missing":
            return image_folder / "nowhere"
        case "a file":
            return image_folder / "train/class0/000.jpg"
        case "empty":
            (image_folder / "void").mkdir()
            return image_folder / "void"
        case "no test":
            shutil.rmtree(image_folder / "test")
        case "no classes":
            shutil.rmtree(image_folder / "train")
            (image_folder / "train").mkdir()
        case "an empty class":
            (image_folder / "train/class3").mkdir()
            (image_folder / "test/class3").mkdir()
        case "other classes":
            (image_folder / "test/class2").rename(image_folder / "test/zebra")
    return image_folder


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", r"TRAIN_DATA_DIR=.*nowhere: no such folder"),
        ("a file", r"is a file, not a folder"),
        ("empty", r"is empty; it needs train/ and test/"),
        ("no test", r"holds train; it needs train/ and test/"),
        ("no classes", r"train: no class folders"),
        ("an empty class", r"class3: the class has no images"),
        ("other classes", r"classes differ, only in train/: class2; only in test/: zebra"),
    ],
)
def test_list_splits_unusable_folder_raises(image_folder: Path, how: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        list_splits(break_folder(image_folder, how))
    assert error.value.code == 2
    assert len(str(error.value).splitlines()) == 1


def test_list_splits_without_folder_raises() -> None:
    with pytest.raises(UserError, match="needs TRAIN_DATA_DIR"):
        list_splits(None)


def imagefolder(folder: Path, **settings: object) -> TrainSettings:
    return train_settings({"dataset": "imagefolder", "data_dir": folder, **settings})


def test_inspect_dataset_counts_and_sizes_a_folder(image_folder: Path) -> None:
    assert inspect_dataset(imagefolder(image_folder)) == DatasetInfo(36, (3, 16, 16))


@pytest.mark.parametrize(
    ("size", "mode", "asked", "shape"),
    [
        ((20, 12), "RGB", "auto", (3, 12, 20)),
        ((28, 28), "L", "auto", (1, 28, 28)),
        ((200, 150), "RGB", "auto", (3, 224, 224)),
        ((200, 150), "RGB", 64, (3, 64, 64)),
    ],
)
def test_inspect_dataset_keeps_small_image_size(
    tmp_path: Path, size: tuple[int, int], mode: str, asked: object, shape: tuple[int, int, int]
) -> None:
    for split in ("train", "test"):
        paint(tmp_path / split, each=1, size=size, mode=mode)
    assert inspect_dataset(imagefolder(tmp_path, image_size=asked)).shape == shape


def test_inspect_dataset_known_data_reads_nothing() -> None:
    assert inspect_dataset(TrainSettings()) == DatasetInfo(1797, (1, 8, 8))
    synthetic = TrainSettings(dataset="synthetic", synthetic_images=100, synthetic_shape="2x5x7")
    assert inspect_dataset(synthetic) == DatasetInfo(120, (2, 5, 7))
