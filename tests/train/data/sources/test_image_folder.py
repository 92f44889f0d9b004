"""Image folders as they are found, and what is said of those that cannot be used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Entrypoint, paint, refusal
from tests.denied_folders import deny, deny_listing
from tests.factories import train_settings
from train.data.dataset_info import DatasetInfo, inspect_dataset, list_files
from train.data.decoding.decoder import jpeg_kernel
from train.data.sources.image_folder import list_splits
from train.data.sources.image_list import ImageList
from train.setting_groups.data import kind_of_folder
from train.settings import TrainSettings, read_train_settings


def test_list_splits_returns_files_and_classes(image_folder: Path) -> None:
    train, test = list_splits(image_folder)
    assert train.classes == test.classes == ("class0", "class1", "class2")
    assert (len(train.files), len(test.files)) == (24, 12)
    assert list(train.labels) == [0] * 8 + [1] * 8 + [2] * 8


def test_list_splits_accepts_val_and_ignores_junk(image_folder: Path) -> None:
    (image_folder / "test").rename(image_folder / "val")
    (image_folder / "train/class0/.DS_Store").write_text("x")
    (image_folder / "train/class0/Thumbs.db").write_text("x")
    (image_folder / "train/.cache").mkdir()
    shutil.copytree(image_folder / "train/class1", image_folder / "train/class0/@eaDir")
    shutil.copytree(image_folder / "train/class1", image_folder / "train/lost+found")
    train, test = list_splits(image_folder)
    assert (len(train.files), len(test.files)) == (24, 12)


@pytest.mark.parametrize(
    ("train", "others", "said"),
    [
        ("Train", {"test": "Test"}, ""),
        ("training", {"test": "testing"}, ""),
        ("train", {"test": "valid"}, ""),
        ("train", {"test": "Validation"}, ""),
        ("train", {"test": "dev"}, ""),
        ("train", {"test": "test", "again": "validation"}, ""),
        ("train", {"test": "val", "again": "valid"}, "val and valid may both be the val images. Keep one of the two."),
        ("train", {"test": "test", "again": "Test"}, "Test and test may both be the test images. Keep one of the two."),
    ],
)
def test_splits_have_their_usual_names(image_folder: Path, train: str, others: dict[str, str], said: str) -> None:
    shutil.copytree(image_folder / "test", image_folder / "again")
    for old, new in {"train": train, **others}.items():
        (image_folder / old).rename(image_folder / new)
    if "again" not in others:
        shutil.rmtree(image_folder / "again")
    if said:
        refusal(list_splits, image_folder, match=said)
        return
    trained, tested = list_splits(image_folder)
    assert trained.classes == ("class0", "class1", "class2")
    assert (len(trained.files), len(tested.files), tested.val_start) == (
        24,
        12 * len(others),
        12 if len(others) > 1 else None,
    )


def test_class_may_have_the_name_of_a_split(image_folder: Path) -> None:
    for old, new in (("class0", "valid"), ("class1", "invalid"), ("class2", "training")):
        (image_folder / "train" / old).rename(image_folder / new)
    shutil.rmtree(image_folder / "train")
    shutil.rmtree(image_folder / "test")
    assert list_splits(image_folder)[0].classes == ("invalid", "training", "valid")


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
        ("no classes", r"train: no class folders"),
        ("an empty class", r"class3: the class has no images"),
        ("other classes", r"classes differ, only in train/: class2; only in test/: zebra"),
    ],
)
def test_list_splits_unusable_folder_raises(image_folder: Path, how: str, said: str) -> None:
    refusal(list_files, imagefolder(break_folder(image_folder, how)), match=said)


def imagefolder(folder: Path | None, **settings: object) -> TrainSettings:
    return train_settings({"dataset": "imagefolder", "data_dir": folder, **settings})


def test_inspect_dataset_counts_and_sizes_a_folder(image_folder: Path) -> None:
    has_kernel = jpeg_kernel() is not None
    assert inspect_dataset(imagefolder(image_folder)) == DatasetInfo(
        36,
        (3, 16, 16),
        becomes="color",
        class_counts=(8, 8, 8),
        train_images=24,
        has_kernel=has_kernel,
        classes=("class0", "class1", "class2"),
        shared=(0, 12),
    )


def test_images_to_evaluate_are_counted_once(image_folder: Path) -> None:
    for folder, images in ((image_folder, 12), (image_folder / "train", 24)):
        found = inspect_dataset(imagefolder(folder, evaluate="runs/latest"))
        assert (found.images, found.train_images) == (images, 0)


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


@pytest.mark.parametrize(("large", "shape"), [(1, (3, 32, 48)), (5, (3, 224, 224))])
def test_few_large_images_do_not_enlarge_the_others(tmp_path: Path, large: int, shape: tuple[int, int, int]) -> None:
    for split in ("train", "test"):
        paint(tmp_path / split, each=3, size=(48, 32))
    for path in sorted((tmp_path / "train").rglob("*.*g"))[:large]:
        Image.new("RGB", (900, 600)).save(path)
    assert inspect_dataset(imagefolder(tmp_path)).shape == shape


def test_inspect_dataset_known_data_reads_nothing() -> None:
    assert inspect_dataset(TrainSettings()) == DatasetInfo(
        1797, (1, 8, 8), train_images=1442, classes=tuple("0123456789")
    )
    synthetic = TrainSettings().with_values(dataset="synthetic", synthetic_images=100, synthetic_shape="2x5x7")
    loading = 3 * 70 * 100 + 8 * 70 * 10 + 8 * 120
    assert inspect_dataset(synthetic) == DatasetInfo(
        120, (2, 5, 7), train_images=100, loading_bytes=loading, classes=tuple(f"class{one}" for one in range(10))
    )
    few = TrainSettings().with_values(dataset="synthetic", synthetic_images=10)
    assert inspect_dataset(few).images == 20


def add_link(folder: Path, target: str) -> Path:
    link = folder / "train/class0/zz"
    link.symlink_to(target)
    return link


def add_fifo(folder: Path) -> Path:
    os.mkfifo(folder / "train/class0/zz.png")
    return folder / "train/class0/zz.png"


def add_unreadable_folder(folder: Path) -> Path:
    inner = folder / "train/class0/inner"
    inner.mkdir()
    (folder / "train/class0/001.png").rename(inner / "001.png")
    inner.chmod(0)
    return inner


def add_mutual_links(folder: Path) -> Path:
    for name, other in (("x", "y"), ("y", "x")):
        (folder / name).mkdir()
        (folder / name / "to").symlink_to(folder / other)
    (folder / "train/class0/x").symlink_to(folder / "x")
    return folder / "train/class0/x/to/to"


UNUSABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "link to nowhere": (lambda folder: add_link(folder, "/nowhere/x.png"), "a link to a file that is not there"),
    "link to itself": (lambda folder: add_link(folder, "zz"), "Too many levels of symbolic links"),
    "link to its own folder": (lambda folder: add_link(folder, "."), "a link to a folder above it"),
    "link to the split": (lambda folder: add_link(folder, ".."), "a link to a folder above it"),
    "link to the root": (lambda folder: add_link(folder, "/"), "a link to a folder above it"),
    "links to each other": (add_mutual_links, "a link to a folder above it"),
    "named pipe": (add_fifo, "not a regular file"),
    "folder that cannot be listed": (add_unreadable_folder, r"cannot be listed \(Permission denied\)"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_entry_is_refused_by_plan_and_run_or_left_out(
    image_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, reason = UNUSABLE[name]
    path = make(image_folder)
    if name == "folder that cannot be listed" and os.geteuid() == 0:  # root may list it
        deny_listing(monkeypatch, path)
    for look in (list_splits, lambda folder: inspect_dataset(imagefolder(folder))):
        refusal(look, image_folder, match=f"{path}: {reason}; repair or remove it")
    train, test = list_splits(image_folder, "skip")
    assert [str(one.path) for one in (*train.unreadable, *test.unreadable)] == [str(path)]
    left = 23 if name == "folder that cannot be listed" else 24
    assert (len(train), len(test)) == (left, 12)
    assert inspect_dataset(imagefolder(image_folder, on_unreadable_image="skip")).images == left + 12
    path.chmod(0o755) if path.is_dir() and not path.is_symlink() else None


def test_class_that_links_to_a_folder_above_is_refused(image_folder: Path) -> None:
    for split in ("train", "test"):
        (image_folder / split / "zz").symlink_to(".")
    for policy in ("error", "skip"):
        refusal(list_splits, image_folder, policy, match="train/zz: a link to a folder above it; remove it")


def test_links_to_other_folders_and_files_are_followed(image_folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (image_folder / "train/class0").rename(elsewhere)
    (image_folder / "train/class0").symlink_to(elsewhere)
    (image_folder / "train/class1/zz.png").symlink_to(image_folder / "train/class1/001.png")
    train, _ = list_splits(image_folder)
    assert len(train) == 25


@pytest.mark.parametrize("folder", [".", "train", "train/class0"])
def test_folder_without_permission_is_named(image_folder: Path, folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    deny_listing(monkeypatch, image_folder / folder)
    if folder == ".":
        monkeypatch.setattr("pathlib.Path.is_dir", lambda path: deny(path))
    for look in (list_splits, lambda path: inspect_dataset(imagefolder(path))):
        assert str(image_folder / folder) in refusal(
            look, image_folder, match=r"cannot be (read|listed) \(Permission denied\)"
        )


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
    refusal(list_splits, photos, match="class1: has 2 images, and without test/ a folder is split in three")


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
    assert given.values.data.dataset == (kind or "imagefolder"), "its error says what a folder needs"
    assert read_train_settings({"TRAIN_DATA_DIR": ""}, {}).values == train_settings()
    named = read_train_settings({"TRAIN_DATA_DIR": str(tmp_path), "TRAIN_DATASET": "cifar10"}, {})
    assert named.values.data.dataset == "cifar10"


@pytest.mark.launch
def test_photos_are_trained_on_and_evaluated_by_one_word(entrypoint: Entrypoint, photos: Path) -> None:
    summary = entrypoint.train(photos, env={"TRAIN_EPOCHS": "2", "TRAIN_BATCH_SIZE": "8", "TRAIN_RUN_NAME": "one"})
    assert (summary["dataset"], summary["test_images"], summary["val_images"]) == ("imagefolder", 6, 6)
    shutil.copy(next(photos.glob("*/*")), photos / "loose.jpg")
    plan = entrypoint.plan("train", photos, env={"TRAIN_BATCH_SIZE": "8"})
    assert any(line.startswith(f"images in {photos} lie next to the classes'") for line in plan["warnings"])
    assert "a tenth of each class is tested" in next(
        one["reason"] for one in plan["decisions"] if one["key"] == "dataset"
    )
    result = entrypoint("evaluate", "runs/one")
    assert (result.code, "of 6 images" in result.out) == (0, True), result.out + result.err
