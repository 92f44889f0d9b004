"""A folder is taken for what it is: classes at its top, splits, lists or tar files; one without a test is split."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import Entrypoint, paint
from tests.factories import train_settings
from train.data.sources.image_folder import list_splits
from train.data.sources.image_list import ImageList
from train.setting_groups.folder_kind import kind_of_folder
from train.settings import read_train_settings


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Return a folder of three classes with twenty images each, and what an archive of macOS leaves."""
    paint(tmp_path / "photos", classes=3, each=20)
    (tmp_path / "photos/__MACOSX/class0").mkdir(parents=True)
    (tmp_path / "photos/__MACOSX/class0/x.jpg").touch()
    for name in (".DS_Store", "class0/._0.jpg"):
        (tmp_path / "photos" / name).touch()
    return tmp_path / "photos"


def names(listing: ImageList) -> list[str]:
    return [listing.files.relative(row) for row in range(len(listing))]


def test_folder_of_classes_is_split(photos: Path) -> None:
    train, test = list_splits(photos)
    assert (len(train), len(test), test.val_start, test.is_cut) == (48, 12, 6, True)
    assert sorted(names(train) + names(test)) == sorted(set(names(train) + names(test)))
    assert [train.labels.count(label) for label in range(3)] == [16] * 3
    assert train.classes == ("class0", "class1", "class2")
    again = list_splits(photos)
    assert (names(again[0]), names(again[1])) == (names(train), names(test))
    whole = list_splits(photos, cuts_val=False)
    assert (len(whole[0]), len(whole[1]), whole[1].val_start) == (54, 6, None)


def test_train_alone_is_split_too(photos: Path) -> None:
    (photos.parent / "data").mkdir()
    photos.rename(photos.parent / "data/train")
    assert [len(one) for one in list_splits(photos.parent / "data")] == [48, 12]


def test_class_with_too_few_images_is_named(photos: Path) -> None:
    for file in sorted((photos / "class1").glob("[0-9]*"))[2:]:
        file.unlink()
    with pytest.raises(UserError, match="class1: has 2 images, and without test/ a folder is split in three"):
        list_splits(photos)


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        (("cat/a.jpg", "dog/b.PNG"), "imagefolder"),
        (("train/cat/a.jpg", "test/cat/b.jpg"), "imagefolder"),
        (("train.csv", "cat/a.jpg"), "csv"),
        (("train/0.tar", "test/0.tar"), "shards"),
        (("FashionMNIST/raw/train-images-idx3-ubyte",), ""),
        (("data/train-0.parquet",), "hf"),
        (("dataset_dict.json", "train/data.arrow"), "hf"),
        (("notes.txt",), ""),
        ((), ""),
    ],
)
def test_kind_is_by_what_is_there(tmp_path: Path, files: tuple[str, ...], kind: str) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert kind_of_folder(tmp_path) == kind
    given = read_train_settings({"TRAIN_DATA_DIR": str(tmp_path)}, {})
    assert given.values.dataset == (kind or "imagefolder"), "its error says what a folder needs"
    assert read_train_settings({"TRAIN_DATA_DIR": ""}, {}).values == train_settings()
    named = read_train_settings({"TRAIN_DATA_DIR": str(tmp_path), "TRAIN_DATASET": "cifar10"}, {})
    assert named.values.dataset == "cifar10"


@pytest.mark.launch
def test_photos_are_trained_on_and_evaluated_by_one_word(entrypoint: Entrypoint, photos: Path) -> None:
    summary = entrypoint.train(photos, env={"TRAIN_EPOCHS": "2", "TRAIN_BATCH_SIZE": "8", "TRAIN_RUN_NAME": "one"})
    assert (summary["dataset"], summary["test_images"], summary["val_images"]) == ("imagefolder", 6, 6)
    plan = entrypoint.plan("train", photos, env={"TRAIN_BATCH_SIZE": "8"})
    assert "a tenth of each class is tested" in next(
        one["reason"] for one in plan["decisions"] if one["key"] == "dataset"
    )
    result = entrypoint("evaluate", "runs/one")
    assert (result.code, "of 6 images" in result.out) == (0, True), result.out + result.err
