"""Data sets of Hugging Face: their own library writes them here, and the trainer reads them as it reads folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.factories import train_settings
from tests.train.given import TWO_RANKS, losses
from tests.train.object_storage import gateway, s3_server
from train.data.decoding.decoder import read_image
from train.data.sources import own_dataset
from train.data.sources.image_list import ImageList, UnreadableImage
from train.data.sources.own_dataset import list_own_splits

has_datasets = find_spec("datasets") is not None
needs_datasets = pytest.mark.skipif(not has_datasets, reason="needs datasets: pip install 'datasets>=4'")


def rows_of(folder: Path, **more: Any) -> Any:
    """Return a data set of the images in class folders, with columns of more values."""
    from datasets import ClassLabel, Dataset, Features, Image

    files = sorted(folder.rglob("*.*"))
    names = sorted({file.parent.name for file in files})
    columns = {"photo": [str(file) for file in files], "kind": [names.index(file.parent.name) for file in files]}
    types = {"photo": Image(), "kind": ClassLabel(names=names)}
    values = {name: [make(row) for row in range(len(files))] for name, (make, _) in more.items()}
    return Dataset.from_dict(columns | values, Features(types | {name: kind for name, (_, kind) in more.items()}))


@pytest.fixture
def saved(tmp_path: Path, image_folder: Path) -> Path:
    """Return a folder that the library has saved."""
    from datasets import DatasetDict

    DatasetDict({split: rows_of(image_folder / split) for split in ("train", "test")}).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def listed(folder: Path | str, **more: Any) -> tuple[ImageList, ImageList]:
    return list_own_splits(train_settings({"dataset": f"hf:{folder}", **more}))


@needs_datasets
@pytest.mark.parametrize("kind", ["saved", "parquet"])
def test_images_and_classes_are_those_of_the_files(
    saved: Path, image_folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved
    if kind == "parquet":
        folder = saved.parent / "hub"
        (folder / "data").mkdir(parents=True)
        for split in ("train", "validation"):
            rows_of(image_folder / split.replace("validation", "test")).to_parquet(folder / f"data/{split}-0.parquet")
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", saved.parent / "cache")
    train, test = listed(folder)
    files = sorted((image_folder / "train").rglob("*.*"))
    assert (len(train), len(test), train.classes) == (24, 12, ("class0", "class1", "class2"))
    for row in (0, 9, 23):
        assert train.classes[train.labels[row]] == files[row].parent.name
        assert np.array_equal(read_image(train.files[row], (3, 16, 16)), read_image(files[row], (3, 16, 16)))
    assert test.val_start is None


@needs_datasets
def test_split_without_labels_tests_nothing(tmp_path: Path, image_folder: Path) -> None:
    from datasets import DatasetDict

    train, test = rows_of(image_folder / "train"), rows_of(image_folder / "test")
    hidden = test.map(lambda _: {"kind": -1})
    DatasetDict({"train": train, "test": hidden, "validation": test}).save_to_disk(tmp_path / "three")
    assert [len(one) for one in listed(tmp_path / "three")] == [24, 12]
    DatasetDict({"train": train, "validation": test, "test": test}).save_to_disk(tmp_path / "all")
    _, tested = listed(tmp_path / "all")
    assert (len(tested), tested.val_start) == (24, 12)
    train.save_to_disk(tmp_path / "alone")
    first, again = listed(tmp_path / "alone"), listed(tmp_path / "alone", seed=1)
    assert [len(one) for one in first] == [21, 3]
    assert list(first[1].labels) == list(again[1].labels)


@needs_datasets
def test_folder_of_a_format_s_name_is_that_folder(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """datasets takes a relative `parquet` for a format, and reads all such files of the working folder."""
    for name in ("parquet", "other"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            rows_of(image_folder / split).to_parquet(tmp_path / name / f"{split}.parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    assert [len(one) for one in listed("parquet")] == [24, 12]


@needs_datasets
def test_number_below_zero_is_a_label_where_labels_are_numbers(tmp_path: Path, image_folder: Path) -> None:
    from datasets import DatasetDict, Value

    sign = {"sign": (lambda row: -1 if row % 2 == 0 else 1, Value("int64"))}
    splits = {split: rows_of(image_folder / split, **sign) for split in ("train", "test")}
    DatasetDict(splits).save_to_disk(tmp_path / "signs")
    train, test = listed(tmp_path / "signs", data_columns="photo,sign")
    assert (len(train), len(test), train.classes) == (24, 12, ("-1", "1"))


@needs_datasets
def test_targets_of_other_tasks(tmp_path: Path, image_folder: Path) -> None:
    from datasets import ClassLabel, List, Value

    tags = List(ClassLabel(names=["red", "round"]))
    more = {
        "tags": (lambda row: [row % 2, 1] if row % 2 == 0 else [], tags),
        "age": (lambda row: -1 if row == 18 else row / 2, Value("float32")),  # the first row to test
    }
    rows_of(image_folder / "train", **more).train_test_split(6, shuffle=False).save_to_disk(tmp_path / "set")
    train, _ = listed(tmp_path / "set", task="multilabel", data_columns="photo,tags")
    assert (train.classes, list(train.targets.values)[:4]) == (("red", "round"), [1, 1, 0, 0])
    train, test = listed(tmp_path / "set", task="regress", data_columns="photo,age")
    assert list(train.targets.values)[:3] == [0, 0.5, 1]
    assert (len(train), len(test)) == (18, 6)


@needs_datasets
@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"data_columns": "photo,nobody"}, "TRAIN_DATA_COLUMNS: no column nobody. Choose of photo, kind, other."),
        ({}, "has 1 columns of images and 2 of class labels among photo (Image), kind (ClassLabel), other"),
    ],
)
def test_columns_that_are_not_clear_are_named(
    tmp_path: Path, image_folder: Path, more: dict[str, str], said: str
) -> None:
    from datasets import ClassLabel

    rows_of(image_folder / "train", other=(lambda _: 0, ClassLabel(names=["a"]))).save_to_disk(tmp_path / "set")
    assert said in refusal(listed, tmp_path / "set", **more)


@needs_datasets
def test_what_the_library_raises_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "set/data").mkdir(parents=True)
    (tmp_path / "set/data/train-0.parquet").write_bytes(b"no parquet")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    assert refusal(listed, tmp_path / "set").startswith(f"TRAIN_DATASET=hf:{tmp_path}/set: raised ")


@needs_datasets
def test_row_without_an_image_or_with_a_pipe_is_unreadable(tmp_path: Path, image_folder: Path) -> None:
    from datasets import ClassLabel, Dataset, Features, Image
    from pyarrow import parquet

    file = next((image_folder / "train/class0").iterdir())
    os.mkfifo(tmp_path / "pipe")
    stored = [{"bytes": None, "path": str(tmp_path / "pipe")}, None, {"bytes": file.read_bytes(), "path": None}]
    types = Features({"image": Image(decode=False), "label": ClassLabel(names=["a", "b"])})
    made = Dataset.from_dict({"image": stored * 10, "label": [0, 1, 0] * 10}, types)
    (tmp_path / "set").mkdir()
    parquet.write_table(made.data.table, tmp_path / "set/train-0.parquet")
    train, test = listed(tmp_path / "set")
    read = [read_image(one.files[row], (3, 16, 16)) for one in (train, test) for row in range(len(one))]
    bad = [str(image) for image in read if isinstance(image, UnreadableImage)]
    assert len(bad) == 20
    assert sum("its row has no image" in text for text in bad) == 10


@needs_datasets
def test_folder_stays_as_it_is_and_other_columns_are_not_read(tmp_path: Path, image_folder: Path) -> None:
    from datasets import Image

    broken = {"bytes": b"no image", "path": None}
    rows_of(image_folder / "train", mask=(lambda _: broken, Image())).save_to_disk(tmp_path / "one")
    before = sorted(path.name for path in (tmp_path / "one").iterdir())
    train, test = listed(tmp_path / "one", data_columns="photo,kind")
    assert (len(train), len(test)) == (21, 3)
    assert not isinstance(read_image(train.files[0], (3, 16, 16)), UnreadableImage)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == before


@needs_datasets
@pytest.mark.parametrize("name", ["validation", "valid", "val", "dev"])
def test_validation_split_by_any_name_chooses(saved: Path, image_folder: Path, name: str) -> None:
    from datasets import DatasetDict

    parts = {"train": "train", "test": "test", name: "test"}
    DatasetDict({split: rows_of(image_folder / part) for split, part in parts.items()}).save_to_disk(saved / "all")
    _, tested = listed(saved / "all")
    assert (len(tested), tested.val_start) == (24, 12)


@pytest.mark.parametrize(
    ("version", "said"), [("", "needs datasets, which is not installed here"), ("3.6.0", "needs datasets 4 or newer")]
)
def test_missing_library_is_one_line(monkeypatch: pytest.MonkeyPatch, version: str, said: str) -> None:
    monkeypatch.setattr("entrypoint.core.packages.find_spec", lambda _: version or None)
    monkeypatch.setattr(own_dataset, "package_version", lambda _: version)
    refusal(listed, "nobody", match=said, code=3)


@needs_datasets
@needs_two_cores
@pytest.mark.launch
def test_run_is_resumed_and_evaluated(entrypoint: Entrypoint, saved: Path) -> None:
    env = {
        "TRAIN_EPOCHS": "2", "TRAIN_BATCH_SIZE": "8", "LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0",
        "TRAIN_MODEL": "cnn",
    }  # fmt: skip
    straight = entrypoint.train(str(saved), "--run-name=one", "--keep-checkpoints=9", env=env)
    named = env | {"TRAIN_DATASET": f"hf:{saved}"}
    entrypoint.train("--run-name=two", env=named | TWO_RANKS)
    assert losses(entrypoint, "two") == pytest.approx(losses(entrypoint, "one"), rel=1e-3)
    entrypoint.cut("one")
    again = entrypoint.train("--resume", "runs/one", env={"LAUNCH_QUIET": "1"})
    assert again["weights_sha256"] == straight["weights_sha256"]
    entrypoint.succeed("evaluate", "runs/two")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return the address of a real S3 server with the bucket `pets`, whose variables are set."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf/datasets")
    monkeypatch.setattr("datasets.config.DOWNLOADED_DATASETS_PATH", tmp_path / "hf/downloads")
    with s3_server("pets") as address:
        yield address


def put(folder: Path, split: str, name: str) -> None:
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    rows_of(folder / split).to_parquet(folder / "x.parquet")
    s3fs.S3FileSystem().put(str(folder / "x.parquet"), f"pets/small/{name}")


@needs_datasets
def test_bucket_gives_the_images_of_its_files(bucket: str, image_folder: Path, tmp_path: Path) -> None:
    assert bucket
    put(image_folder, "train", "data/train-00000-of-00001.parquet")
    put(image_folder, "test", "data/test-00000-of-00001.parquet")
    put(image_folder, "test", "holdout.parquet")
    train, test = listed("s3://pets/small")
    files = sorted((image_folder / "train").rglob("*.*"))
    assert (len(train), len(test), train.classes) == (24, 12, ("class0", "class1", "class2"))
    assert np.array_equal(read_image(train.files[9], (3, 16, 16)), read_image(files[9], (3, 16, 16)))
    put(image_folder, "test", "data/train-00000-of-00001.parquet")
    assert len(listed("s3://pets/small")[0]) == 12, "a file that changed is downloaded again"
    assert "hidden-key" not in "".join(file.read_text(errors="replace") for file in tmp_path.rglob("*.json"))
    for address, problem in (("s3://pets/none", "contain any data files"), ("s3://gone/x", "contain any data files")):
        refusal(listed, address, match=rf"^TRAIN_DATASET=hf:{address}: .*{problem}")


@needs_datasets
def test_server_that_is_busy_is_asked_again(bucket: str, image_folder: Path) -> None:
    put(image_folder, "train", "train.parquet")
    put(image_folder, "test", "validation.parquet")
    with gateway(bucket, lambda _method, _path, before: "" if before else "busy"):
        train, test = listed("s3://pets/small")
    assert (len(train), len(test)) == (24, 12)
