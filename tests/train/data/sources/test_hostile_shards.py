"""Each fault of a folder of shards is one line, by the plan as well as by the run."""

from __future__ import annotations

import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.core.errors import UserError
from tests.conftest import Entrypoint
from tests.train.data.shard_files import image_bytes, list_both, samples, settings_for, write_tar
from tests.train.given import imagefolder
from train.data.dataset_info import inspect_dataset, list_files


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
        with pytest.raises(UserError) as caught:
            look(packed)
        assert said in str(caught.value)
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith(("TRAIN_DATA_DIR", str(packed)))


def test_folder_must_be_named_and_there(tmp_path: Path) -> None:
    for folder, said in (
        (None, "needs TRAIN_DATA_DIR"),
        (tmp_path / "x", "no such folder"),
        (Path(__file__), "a file"),
    ):
        with pytest.raises(UserError, match=said):
            list_files(settings_for(folder))


@pytest.mark.launch
def test_plan_and_run_refuse_a_fault(entrypoint: Entrypoint, packed: Path) -> None:
    fault, said = FAULTS["cut"]
    fault(packed)
    for command in ("plan", "train"):
        result = entrypoint(command, env=imagefolder(packed, TRAIN_DATASET="shards"))
        assert result.code == 2
        (line,) = result.error_lines
        assert said in line
