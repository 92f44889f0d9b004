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
from train.data.dataset_info import inspect_dataset
from train.data.sources.shards import list_shard_splits


def remove_train(folder: Path) -> None:
    shutil.rmtree(folder / "train")


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def empty_train(folder: Path) -> None:
    for path in (folder / "train").iterdir():
        path.unlink()


def cut(folder: Path) -> None:
    os.truncate(folder / "train/train-000001.tar", 700)


def drop_labels(folder: Path) -> None:
    write_tar(folder / "test/test-000000.tar", samples([0, 1])[::2])


def drop_images(folder: Path) -> None:
    write_tar(folder / "test/test-000000.tar", samples([0, 1])[1::2])


def compress(folder: Path) -> None:
    path = folder / "train/train-000000.tar"
    path.with_name("train-000000.tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()


def compress_inside(folder: Path) -> None:
    path = folder / "train/train-000000.tar"
    path.write_bytes(gzip.compress(path.read_bytes()))


def link_to_nothing(folder: Path) -> None:
    (folder / "train/x.tar").symlink_to("nowhere")


def make_folder(folder: Path) -> None:
    (folder / "train/x.tar").mkdir()


def put_text(folder: Path) -> None:
    (folder / "train/x.tar").write_text("x" * 2000)


def twice(folder: Path) -> None:
    shutil.copy(folder / "train/train-000000.tar", folder / "train-9.tar")


def short_classes(folder: Path) -> None:
    (folder / "classes.txt").write_text("a\nb\n")


def long_classes(folder: Path) -> None:
    (folder / "classes.txt").write_text("a\nb\nc\nd\n")


def double_classes(folder: Path) -> None:
    (folder / "classes.txt").write_text("a\nb\na\n")


def blank_class(folder: Path) -> None:
    (folder / "classes.txt").write_text("a\n\nb\n")


def new_class_in_test(folder: Path) -> None:
    (folder / "classes.txt").unlink()
    write_tar(folder / "test/x.tar", samples([7]))


def odd_names(folder: Path) -> None:
    write_tar(folder / "train/\x1b[31m\n.tar", [("\x1b[31m.jpg", image_bytes())])


FAULTS: dict[Callable[[Path], None], str] = {
    remove_train: "packed: holds classes.txt, test; it needs train/*.tar and test/*.tar (or val/)",
    empty: "packed: is empty; it needs train/*.tar",
    empty_train: "packed: holds classes.txt, test, train; it needs train/*.tar",
    cut: "packed: train/train-000001.tar is cut short: 000010.jpg lacks ",
    drop_labels: "packed: test/test-000000.tar has no label for 000000. Add 000000.cls",
    drop_images: "packed: test/test-000000.tar has no image for 000000, only cls",
    compress: "packed: train/train-000000.tar.gz is compressed, so no image can be read by itself. Decompress it to a",
    compress_inside: "packed: train/train-000000.tar is compressed by gzip, so no image can be read by itself",
    link_to_nothing: "packed/train/x.tar is no shard, but a link to a file that is not there",
    make_folder: "packed/train/x.tar is no shard, but not a regular file",
    put_text: "packed: train/x.tar is no whole tar file",
    twice: "packed: has shards in train/, and train-9.tar next to it",
    short_classes: "has label 2, and classes.txt names 2 classes from 0 on",
    long_classes: "packed: classes differ, only in classes.txt: d",
    double_classes: "classes.txt, line 3: a is there twice",
    blank_class: "classes.txt, line 2: is no name",
    new_class_in_test: "packed: classes differ, only in test/: 7",
    odd_names: r"packed: train/\x1b[31m\n.tar has no label for \x1b[31m. Add",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_one_line(packed: Path, fault: Callable[[Path], None]) -> None:
    fault(packed)
    for look in (list_both, lambda folder: inspect_dataset(settings_for(folder))):
        with pytest.raises(UserError) as caught:
            look(packed)
        assert FAULTS[fault] in str(caught.value)
        assert str(caught.value).isprintable()
        assert str(caught.value).startswith(("TRAIN_DATA_DIR", str(packed)))


def test_folder_must_be_named_and_there(tmp_path: Path) -> None:
    for folder, said in (
        (None, "needs TRAIN_DATA_DIR"),
        (tmp_path / "x", "no such folder"),
        (Path(__file__), "a file"),
    ):
        with pytest.raises(UserError, match=said):
            list_shard_splits(folder, tmp_path / "cache")


@pytest.mark.launch
@pytest.mark.parametrize("fault", [cut, compress], ids=lambda fault: fault.__name__)
def test_plan_and_run_refuse_a_fault(entrypoint: Entrypoint, packed: Path, fault: Callable[[Path], None]) -> None:
    fault(packed)
    for command in ("plan", "train"):
        result = entrypoint(command, env=imagefolder(packed, TRAIN_DATASET="shards"))
        assert result.code == 2
        (line,) = result.error_lines
        assert FAULTS[fault] in line
