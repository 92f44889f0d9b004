"""Shards train what the same files in folders train, and each fault of theirs is one line."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.factories import train_settings
from tests.train.data.shard_files import image_bytes, list_both, pack, pack_lists, samples, settings_for, write_tar
from tests.train.given import TWO_RANKS, epochs_of, imagefolder
from train.data.dataset_info import DatasetInfo, inspect_dataset, list_files
from train.data.datasets import load
from train.data.feeds.loader import BatchRequest, ImageDataset
from train.data.sources.image_folder import list_splits
from train.data.sources.shards import list_shard_splits
from train.data.val_split import TEST, TRAIN
from train.data.workers import WorkerSpec

POOL = WorkerSpec(frozenset({0}), 1)
SHAPE = (3, 16, 16)


def test_listing_is_that_of_the_folder(image_folder: Path, packed: Path) -> None:
    for own, other in zip(list_both(packed), list_splits(image_folder), strict=True):
        assert (own.classes, own.labels) == (other.classes, other.labels)
        for row in range(len(own)):
            folder_name = str(other.files[row])
            assert own.files[row].name.endswith(Path(folder_name).suffix)
    found = inspect_dataset(settings_for(packed))
    folder = inspect_dataset(train_settings(dataset="imagefolder", data_dir=image_folder))
    assert isinstance(found, DatasetInfo)
    assert found == replace(folder, shared=(0, 0)), "of shards no copies are looked for"
    evaluated = inspect_dataset(settings_for(packed, evaluate="runs/latest"))
    assert (evaluated.images, evaluated.train_images, evaluated.classes) == (12, 0, found.classes)


@pytest.mark.parametrize("label_ending", ["cls", "json"])
def test_images_are_those_of_the_folder(image_folder: Path, tmp_path: Path, label_ending: str) -> None:
    folder = pack(image_folder, tmp_path / "packed", 7, label_ending)
    ours, theirs = (ImageDataset(listings, SHAPE) for listings in (list_both(folder), list_splits(image_folder)))
    for split, count in ((TRAIN, 24), (TEST, 12)):
        request = BatchRequest(split, range(count))
        (images, labels, bad), (others, other_labels, _) = ours[request], theirs[request]
        assert not bad
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


@pytest.mark.parametrize("source", ["memory", "stream"])
@pytest.mark.parametrize("policy", ["error", "skip"])
def test_unreadable_image_is_named_or_left_out(packed: Path, source: str, policy: str) -> None:
    damaged = [("x0.jpg", b"no image"), ("x0.cls", b"0"), ("x1.png", b""), ("x1.cls", b"1")]
    write_tar(packed / "train/x.tar", damaged)
    settings = settings_for(packed, on_unreadable_image=policy)
    if source == "stream":
        dataset = ImageDataset(list_both(packed), SHAPE)
        _, labels, bad = dataset[BatchRequest(TRAIN, range(26))]
        assert [str(one) for one in bad] == [
            f"{packed}/train/x.tar:x0.jpg: not an image", f"{packed}/train/x.tar:x1.png: empty file",
        ]  # fmt: skip
        assert labels[24:].tolist() == [-1, -1]
    elif policy == "error":
        refusal(load, settings, SHAPE, source, POOL, match=r"train/x\.tar:x0\.jpg: not an image \(and 1 more\)")
    else:
        data = load(settings, SHAPE, source, POOL)
        assert (len(data.train), len(data.skipped)) == (24, 2)


def test_class_without_readable_image_is_named(packed: Path) -> None:
    for split in ("train", "test"):
        write_tar(packed / split / "x.tar", [("x.jpg", b"no image"), ("x.cls", b"3")])
    (packed / "classes.txt").write_text("a\nb\nc\nd\n")
    for source in ("memory", "stream"):
        refusal(
            load,
            settings_for(packed, on_unreadable_image="skip"),
            SHAPE,
            source,
            POOL,
            match=r"packed: class d has no images that can be read; 1 cannot, first .*x\.jpg",
        )


def flatten(folder: Path) -> None:
    """Move the shards to the top of the folder, as their names allow."""
    for split in ("train", "test"):
        for path in (folder / split).iterdir():
            path.rename(folder / path.name)
        (folder / split).rmdir()


def test_shards_may_be_at_the_top(packed: Path) -> None:
    before = [listing.labels for listing in list_both(packed)]
    flatten(packed)
    (packed / "README.txt").write_text("x")
    assert [listing.labels for listing in list_both(packed)] == before
    (packed / "more-0.tar").write_bytes(b"")
    refusal(list_both, packed, match=r"more-0\.tar is of no split\. Name it train-\*\.tar")


@pytest.mark.parametrize(
    ("names", "images"),
    [
        (("test/a.tar", "train/b.tar"), 2),
        (("val/a.tar", "train/b.tar", "train/c.tar"), 2),
        (("train-a.tar", "val-b.tar"), 2),
        (("a.tar", "b.tar", "train/c.tar"), 4),
    ],
)
def test_shards_to_evaluate_need_no_train(tmp_path: Path, names: tuple[str, ...], images: int) -> None:
    for name in names:
        write_tar(tmp_path / "data" / name, samples([1, 3]))
    (tmp_path / "data/classes.txt").write_text("a\nb\nc\nd\ne\n")
    train, test = list_shard_splits(tmp_path / "data", tmp_path / "cache", only_test=True)
    assert train is test
    assert (len(test), test.classes) == (images, ("b", "d"))


def test_folder_without_shards_cannot_be_evaluated(tmp_path: Path) -> None:
    refusal(list_shard_splits, tmp_path, None, only_test=True, match=r"is empty; it needs \*\.tar to evaluate")


def test_val_chooses_or_is_tested(packed: Path) -> None:
    shutil.copytree(packed / "test", packed / "val")
    train, test = list_both(packed)
    assert (len(train), len(test), test.val_start) == (24, 24, 12)
    assert [str(test.files[row]).split("packed/")[1][:5] for row in (0, 11, 12, 23)] == [*["test/"] * 2, *["val/t"] * 2]
    assert load(settings_for(packed), SHAPE, "stream", POOL).rows.val is not None
    shutil.rmtree(packed / "test")
    _, test = list_both(packed)
    assert (len(test), test.val_start) == (12, None)


def test_numbers_name_classes_without_a_file(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_tar(tmp_path / f"data/{split}-0.tar", samples([10, 9, 100]))
    train, test = list_both(tmp_path / "data")
    assert train.classes == test.classes == ("9", "10", "100")
    assert list(train.labels) == [1, 0, 2]


CELLS = {"multilabel": ("label", ["b|a", "", "b", "c|b|a"]), "regress": ("age,size", ["1,2.5", "0.1,-3", "7,0"])}


@pytest.mark.parametrize("task", CELLS)
def test_targets_are_those_of_a_csv(image_folder: Path, tmp_path: Path, task: str) -> None:
    head, cells = CELLS[task]
    for split in ("train", "test", "val"):
        paths = sorted((image_folder / split.replace("val", "test")).rglob("*.*"), reverse=split == "val")
        lines = [f"{path.relative_to(image_folder)},{cells[row % len(cells)]}" for row, path in enumerate(paths)]
        (image_folder / f"{split}.csv").write_text("\n".join([f"file,{head}", *lines]) + "\n")
    packed = pack_lists(image_folder, tmp_path / "packed", task)
    settings = settings_for(packed, task=task)
    csv_settings = train_settings(dataset="csv", data_dir=image_folder, task=task)
    theirs = list_files(csv_settings)
    for again in (False, True):
        ours = list_files(settings)
        for own, other in zip(ours, theirs, strict=True):
            assert (own.classes, own.labels, own.val_start) == (other.classes, other.labels, other.val_start), again
            assert own.targets == other.targets
    facts, others = map(inspect_dataset, (settings, csv_settings))
    assert replace(facts, shared=(0, 0)) == replace(others, shared=(0, 0))
    refusal(list_files, settings_for(packed), match="TRAIN_TASK=multilabel" if task == "multilabel" else "has no label")


@pytest.mark.parametrize(
    ("task", "train", "test", "names", "said"),
    [
        (
            "multilabel",
            '{"labels": ["ant"]}',
            '{"labels": ["bee", "ant"]}',
            "",
            "test-0.tar:a.jpg: bee is no class of train/",
        ),
        ("multilabel", '{"labels": ["ant"]}', '{"labels": ["ant"]}', "bee", "a.jpg: ant is no class of classes.txt"),
        ("multilabel", '{"labels": []}', '{"labels": []}', "", "no image has a label. Add some"),
        (
            "multilabel",
            '{"labels": [1, 0]}',
            '{"labels": [1]}',
            "",
            "test-0.tar:a.jpg has 1 value, and there are 2 targets",
        ),
        ("regress", '{"target": 1}', '{"target": 1}', "age\nsize", "has 1 value, and there are 2 targets, age, size"),
        ("regress", '{"target": 1}', '{"target": [1, 2]}', "", "has 2 values, and there are 1 target, value0. Correct"),
    ],
)
def test_wrong_targets_are_one_line(tmp_path: Path, task: str, train: str, test: str, names: str, said: str) -> None:
    for split, text in (("train", train), ("test", test)):
        write_tar(tmp_path / f"data/{split}-0.tar", [("a.jpg", image_bytes()), ("a.json", text.encode())])
    if names:
        (tmp_path / "data/classes.txt").write_text(names)
    for look in (list_files, inspect_dataset):
        assert said in refusal(look, settings_for(tmp_path / "data", task=task))


def test_values_have_numbers_for_names(tmp_path: Path) -> None:
    for split in ("train", "test"):
        members = [("a.jpg", image_bytes()), ("a.json", b'{"target": [2, 3]}')]
        write_tar(tmp_path / f"data/{split}-0.tar", members)
    train, _ = list_files(settings_for(tmp_path / "data", task="regress"))
    assert train.classes == ("value0", "value1")
    assert list(train.targets.values) == [2, 3]


def test_fingerprint_knows_names_and_bytes(packed: Path) -> None:
    settings = settings_for(packed)
    before = [load(settings, SHAPE, source, POOL).fingerprint(settings) for source in ("stream", "memory")]
    assert before == [load(settings, SHAPE, source, POOL).fingerprint(settings) for source in ("stream", "memory")]
    path = packed / "test/test-000001.tar"
    data = bytearray(path.read_bytes())
    data[data.index(b"\xff\xd9\0") - 3] ^= 1
    path.write_bytes(data)
    after = [load(settings, SHAPE, source, POOL).fingerprint(settings) for source in ("stream", "memory")]
    assert all(old.files == new.files and old.sample != new.sample for old, new in zip(before, after, strict=True))
    assert before[1].content != after[1].content


@pytest.mark.launch
@needs_two_cores
def test_shards_train_and_resume_within_an_epoch(entrypoint: Entrypoint, packed: Path) -> None:
    env = imagefolder(packed, TRAIN_DATASET="shards", TRAIN_DATA_SOURCE="stream", LAUNCH_QUIET="1")
    del env["TRAIN_EPOCHS"]
    shards = env | TWO_RANKS | {"TRAIN_SCHEDULE": "constant", "TRAIN_WARMUP": "0", "TRAIN_STEPS": "8"}
    whole = entrypoint.train("--run-name=shards", env=shards)
    entrypoint.train("--run-name=cut", "--steps=4", env=shards)  # an epoch has three steps
    resumed = entrypoint.train("--run-name=cut", "--resume=auto", "--resume-allow-changed", env=shards)
    assert resumed["weights_sha256"] == entrypoint.summary("shards")["weights_sha256"]
    assert resumed["steps"] == 8
    assert [line["step"] for line in epochs_of(entrypoint, "cut")] == [3, 4, 6, 8]
    result = entrypoint.succeed("evaluate", "runs/shards", env={"LAUNCH_QUIET": "1"})
    assert f"accuracy  {whole['test_accuracy']:.2f} %" in result.out


def empty_train(folder: Path) -> None:
    for path in (folder / "train").iterdir():
        path.unlink()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def compress(folder: Path) -> None:
    path = folder / "train/train-000000.tar"
    path.with_name("train-000000.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def new_class_in_test(folder: Path) -> None:
    (folder / "classes.txt").unlink()
    write_tar(folder / "test/x.tar", samples([7]))


# What is done to a folder of shards, and what is said of it. Faults within a shard are those of test_tar_headers.py.
FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no train": (
        lambda folder: shutil.rmtree(folder / "train"),
        "packed: holds classes.txt, test; it needs train/*.tar and test/*.tar (or val/)",
    ),
    "empty": (empty, "packed: is empty; it needs train/*.tar"),
    "empty train": (empty_train, "packed: holds classes.txt, test, train; it needs train/*.tar"),
    "cut": (
        lambda folder: os.truncate(folder / "train/train-000001.tar", 700),
        "packed/train/train-000001.tar is cut short: 000010.jpg lacks ",
    ),
    "compressed": (
        compress,
        "packed/train/train-000000.tar.gz is compressed by gzip, so no image can be read by itself. Decompress it",
    ),
    "link to nothing": (
        lambda folder: (folder / "train/x.tar").symlink_to("nowhere"),
        "packed/train/x.tar is no shard, but a link to a file that is not there",
    ),
    "folder": (
        lambda folder: (folder / "train/x.tar").mkdir(),
        "packed/train/x.tar is no shard, but not a regular file",
    ),
    "in two places": (
        lambda folder: shutil.copy(folder / "train/train-000000.tar", folder / "train-9.tar"),
        "packed: has shards in train/, and train-9.tar next to it",
    ),
    "few classes": (
        lambda folder: (folder / "classes.txt").write_text("a\nb\n"),
        "has label 2, and classes.txt names 2 classes from 0 on",
    ),
    "many classes": (
        lambda folder: (folder / "classes.txt").write_text("a\nb\nc\nd\n"),
        "packed: classes differ, only in classes.txt: d",
    ),
    "a class twice": (
        lambda folder: (folder / "classes.txt").write_text("a\nb\na\n"),
        "classes.txt, line 3: a is there twice",
    ),
    "class without a name": (
        lambda folder: (folder / "classes.txt").write_text("a\n\nb\n"),
        "classes.txt, line 2: is no name",
    ),
    "new class in test": (new_class_in_test, "packed: classes differ, only in test/: 7"),
    "odd names": (
        lambda folder: write_tar(folder / "train/\x1b[31m\n.tar", [("\x1b[31m.jpg", image_bytes())]),
        r"packed/train/\x1b[31m\n.tar has no label for \x1b[31m. Add",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_one_line(packed: Path, name: str) -> None:
    fault, said = FAULTS[name]
    fault(packed)
    for look in (list_both, lambda folder: inspect_dataset(settings_for(folder))):
        message = refusal(look, packed)
        assert said in message
        assert message.startswith(("TRAIN_DATA_DIR", str(packed)))


def test_folder_must_be_named_and_there(tmp_path: Path) -> None:
    for folder, said in (
        (None, "needs TRAIN_DATA_DIR"),
        (tmp_path / "x", "no such folder"),
        (Path(__file__), "a file"),
    ):
        refusal(list_files, settings_for(folder), match=said)
