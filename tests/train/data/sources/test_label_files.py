"""Images whose classes stand in CSV files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.conftest import refusal
from tests.factories import train_settings
from train.data.dataset_info import inspect_dataset, list_files
from train.data.sources.image_folder import list_splits
from train.settings import TrainSettings


def csv_settings(folder: Path | None, **settings: object) -> TrainSettings:
    return train_settings({"dataset": "csv", "data_dir": folder, **settings})


def write_csv(folder: Path, split: str, lines: list[str], head: str = "file,label") -> None:
    (folder / f"{split}.csv").write_text("\n".join([head, *lines]) + "\n", errors="surrogateescape")


@pytest.fixture
def labelled(image_folder: Path) -> Path:
    """Return a folder with train.csv and test.csv over the painted images."""
    for split in ("train", "test"):
        paths = sorted(path for path in (image_folder / split).rglob("*.*"))
        write_csv(image_folder, split, [f"{path.relative_to(image_folder)},{path.parent.name}" for path in paths])
    return image_folder


def test_listed_files_have_their_labels(labelled: Path) -> None:
    train, test = list_files(csv_settings(labelled))
    assert (len(train), len(test), train.classes) == (24, 12, ("class0", "class1", "class2"))
    assert [list(listing.files) for listing in (train, test)] == [list(one.files) for one in list_splits(labelled)]
    for row, label in enumerate(train.labels):
        assert train.files[row].parent.name == train.classes[label]
    found = inspect_dataset(train_settings(dataset="csv", data_dir=labelled))
    assert (found.images, found.train_images, found.shape, found.classes) == (36, 24, (3, 16, 16), train.classes)
    evaluated = inspect_dataset(train_settings(dataset="csv", data_dir=labelled, evaluate="runs/latest"))
    assert (evaluated.images, evaluated.train_images, evaluated.classes) == (12, 0, train.classes)


@pytest.mark.parametrize("name", ["valid.csv", "Validation.csv", "dev.csv", "Test.csv"])
def test_files_have_their_usual_names(labelled: Path, name: str) -> None:
    (labelled / "test.csv").rename(labelled / name)
    (labelled / "train.csv").rename(labelled / "Train.csv")
    train, test = list_files(csv_settings(labelled))
    assert (len(train), len(test), test.is_cut) == (24, 12, False)


@pytest.mark.parametrize(
    ("cells", "divider"), [(["cat;x", "cat"], ";"), (["a,b", "b"], ","), (["sea lion", "sea"], ""), (["a;b", "c"], "")]
)
def test_cell_of_several_labels_with_another_divider(labelled: Path, cells: list[str], divider: str) -> None:
    for split in ("train", "test"):
        first, second = sorted((labelled / split / "class0").iterdir())[:2]
        named = zip((first, second), cells, strict=True)
        write_csv(labelled, split, [f'{path.relative_to(labelled)},"{cell}"' for path, cell in named])
    settings = csv_settings(labelled, task="multilabel")
    if divider:
        refusal(list_files, settings, match=f"TRAIN_LABEL_SEPARATOR='{divider}'")
    else:
        assert len(list_files(settings)[0]) == 2


def test_column_that_names_another_split_is_refused(labelled: Path) -> None:
    for split in ("train", "test"):
        lines = (labelled / f"{split}.csv").read_text().splitlines()[1:]
        write_csv(labelled, split, [f"{line},{split}" for line in lines], "file,label,Split")
    assert len(list_files(csv_settings(labelled))[0]) == 24
    with (labelled / "train.csv").open("a") as file:
        file.write("train/class0/000.jpg,class0,Valid\n")
    said = r"train\.csv, line 26: column Split says that it is of val\. Write a file for each of train, val and test\."
    refusal(list_files, csv_settings(labelled), match=said)


def test_quotes_spaces_and_other_columns_are_read(labelled: Path) -> None:
    shutil.copy(labelled / "train/class0/000.jpg", labelled / "a, b.jpg")
    lines = ['1,"a, b.jpg", x ', "2,./train/class1/000.jpg,y"]
    for split in ("train", "test"):
        write_csv(labelled, split, lines, "\ufeffid, file ,label")
    train, _ = list_files(csv_settings(labelled))
    assert [path.name for path in train.files] == ["a, b.jpg", "000.jpg"]
    assert train.classes == ("x", "y")


@pytest.mark.parametrize(
    ("divider", "head", "encoding"),
    [
        (";", "file;label", "utf-8"),
        ("\t", "File\tLabel", "utf-16"),
        (",", "sep=,\nLABEL,note,FILE", "utf-8-sig"),
        (",", "Filename,class", "utf-8"),
        ("\t", "image\ttarget", "utf-8"),
    ],
)
def test_lists_of_spreadsheets_are_read(labelled: Path, divider: str, head: str, encoding: str) -> None:
    for split in ("train", "test"):
        rows = [line.split(",") for line in (labelled / f"{split}.csv").read_text().splitlines()[1:]]
        if head.startswith("sep"):
            rows = [[label, "x", str(labelled / file)] for file, label in rows]
        elif divider == ";":
            rows = [[file.replace("/", "\\"), label] for file, label in rows]
        lines = [head, *(divider.join(row) for row in rows), divider * 2, divider]
        (labelled / f"{split}.csv").write_bytes("\r\n".join(lines).encode(encoding))
    train, test = list_files(csv_settings(labelled))
    assert [list(listing.files) for listing in (train, test)] == [list(one.files) for one in list_splits(labelled)]
    assert train.classes == ("class0", "class1", "class2")


def test_val_file_chooses(labelled: Path) -> None:
    shutil.copy(labelled / "test.csv", labelled / "val.csv")
    _, test = list_files(csv_settings(labelled))
    assert (len(test), test.val_start) == (24, 12)
    (labelled / "test.csv").unlink()
    _, test = list_files(csv_settings(labelled))
    assert (len(test), test.val_start) == (12, None)


@pytest.mark.parametrize(
    ("lines", "head", "said"),
    [
        (["nobody.jpg,class0"], "file,label", "train.csv, line 2: nobody.jpg is not there"),
        (["train/class0,class0", "gone/a.jpg,x"], "file,label", "line 3: gone/a.jpg is not there"),
        (["/etc/passwd,class0"], "file,label", "is outside of the folder"),
        (["train/../../x.jpg,class0"], "file,label", "is outside of the folder"),
        (["train.csv,a", "./train.csv,b"], "file,label", "line 3: ./train.csv is listed twice"),
        (["train.csv"], "file,label", "line 2: has no file or no label"),
        (["train.csv,"], "file,label", "line 2: has no file or no label"),
        (["train/class0/000.jpg,a,b"], "file,label", "line 2: has 3 cells, and the first line 2. Quote cells"),
        ([], "file,label", "has no line after the first"),
        (
            ["a,b"],
            "where,class",
            "must name file and label, and names where, class",
        ),
        (["train/class0/000.png,B\udce4r"], "file,label", r"line 2: B\udce4r is no UTF-8. Save the file as CSV UTF-8"),
        (["train/class0/000.JPG,a"], "file,label", "('000.JPG' and '000.jpg' look alike but are two names)"),
        ([], "", "has no column file, label"),
    ],
)
def test_wrong_file_is_one_line(labelled: Path, lines: list[str], head: str, said: str) -> None:
    write_csv(labelled, "train", lines, head)
    for look in (list_files, inspect_dataset):
        assert said in refusal(look, csv_settings(labelled))


def test_classes_of_the_splits_must_be_the_same(labelled: Path) -> None:
    lines = (labelled / "test.csv").read_text().splitlines()
    write_csv(labelled, "test", [*lines[1:], "train.csv,zebra"])
    refusal(list_files, csv_settings(labelled), match=r"test\.csv, line 14: zebra is no class of train\.csv")
    write_csv(labelled, "test", [line for line in lines[1:] if "class1" not in line])
    refusal(list_files, csv_settings(labelled), match=r"classes differ, only in train\.csv: class1")


@pytest.mark.parametrize("task", ["classify", "multilabel"])
def test_train_file_alone_is_split(labelled: Path, task: str) -> None:
    (labelled / "test.csv").unlink()
    settings = csv_settings(labelled, task=task)
    train, test = list_files(settings)
    assert (len(train), len(test), test.is_cut) == ((18, 6, True) if task == "classify" else (20, 4, True))
    assert test.val_start == len(test) // 2
    assert {*train.files, *test.files} == set((labelled / "train").rglob("*.*"))
    whole, tested = list_files(csv_settings(labelled, task=task, val_split=0.1))
    assert (len(whole) + len(tested), tested.val_start) == (24, None)


@pytest.mark.parametrize("names", [(), ("test.csv",)])
def test_missing_file_is_named(tmp_path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        (tmp_path / name).write_text("file,label\n")
    refusal(
        list_files, csv_settings(tmp_path), match=r"needs train\.csv, or test\.csv \(or val\.csv\) to evaluate, and has"
    )
    refusal(list_files, csv_settings(None), match="needs TRAIN_DATA_DIR")


SEVERAL = ["a|b", "", "b | a", "b"]


@pytest.mark.parametrize(
    ("head", "cells", "settings"),
    [
        ("file,label", SEVERAL, {}),
        ("file,label", [cell.replace("|", "+") for cell in SEVERAL], {"label_separator": "+"}),
        ("file,label", [cell.replace(" | ", "  ").replace("|", " ") for cell in SEVERAL], {"label_separator": "space"}),
        ("a,b,file", ["1,1", "0,0", "true,1.0", ",1"], {}),
    ],
)
def test_several_labels_become_rows_of_targets(labelled: Path, head: str, cells: list[str], settings: dict) -> None:
    for split in ("train", "test"):
        paths = sorted(path.relative_to(labelled) for path in (labelled / split).rglob("*.*"))[:4]
        rows = [
            f"{cell},{path}" if head.endswith("file") else f"{path},{cell}"
            for path, cell in zip(paths, cells, strict=True)
        ]
        write_csv(labelled, split, rows, head)
    train, test = list_files(csv_settings(labelled, task="multilabel", **settings))
    assert train.classes == ("a", "b")
    assert list(train.labels) == list(test.labels) == [0, 1, 0, 2]
    assert list(train.targets.values) == [1, 1, 0, 0, 0, 1]
    found = inspect_dataset(csv_settings(labelled, task="multilabel", **settings))
    assert (found.classes, found.task, found.class_counts, found.constant) == (("a", "b"), "multilabel", (), ())


def test_numbers_become_rows_of_targets(labelled: Path) -> None:
    for split, shift in (("train", 0), ("test", 1)):
        paths = sorted(path.relative_to(labelled) for path in (labelled / split).rglob("*.*"))[:3]
        write_csv(labelled, split, [f"{path},{row + shift},-1e3" for row, path in enumerate(paths)], "file,age,size")
    train, test = list_files(csv_settings(labelled, task="regress"))
    assert train.classes == ("age", "size")
    assert list(train.targets.values) == [0, -1000, 1, -1000, 2, -1000, 3, -1000]
    assert (list(train.labels), list(test.labels)) == ([0, 1, 2], [1, 2, 3])
    assert inspect_dataset(csv_settings(labelled, task="regress")).constant == ("size",)


@pytest.mark.parametrize(
    ("task", "head", "cell", "said"),
    [
        ("multilabel", "file,label", "zebra|class1", "line 2: zebra is no class of train.csv"),
        ("multilabel", "file,ant,bee", "1,2", "line 2: 2 is neither 0 nor 1"),
        ("regress", "file,label", "tall", "line 2: tall is no number"),
        ("regress", "file,label", "nan", "line 2: nan is no number"),
        ("regress", "file,label", "1e300", "line 2: 1e300 is no number"),
        ("regress", "file,age,size", "1,", "line 2: an empty cell is no number"),
        ("regress", "file", "", "has no column of labels"),
        ("regress", "file,age,age", "1,2", "two columns have the same name"),
        ("regress", ",file,age", "1,2", "a column has no name, as the index that pandas writes. Name it"),
    ],
)
def test_wrong_target_is_one_line(labelled: Path, task: str, head: str, cell: str, said: str) -> None:
    write_csv(labelled, "test", [f"test/class0/000.jpg,{cell}"], head)
    if head != "file,label":
        write_csv(labelled, "train", ["train/class0/000.jpg,1,0"], head)
    elif task == "regress":
        write_csv(labelled, "train", ["train/class0/000.jpg,1"], head)
    assert said in refusal(list_files, csv_settings(labelled, task=task))


@pytest.mark.parametrize(
    ("labels", "divider"),
    [
        (["ant", "bee", "ant bee"], "space"),
        (["ant", "bee", "ant|bee"], "|"),
        (["polar bear", "brown bear", "bear"], None),
        (["a;b", "b;c"], None),
    ],
)
def test_label_that_looks_like_several_is_refused(labelled: Path, labels: list[str], divider: str | None) -> None:
    for split in ("train", "test"):
        paths = sorted(path.relative_to(labelled) for path in (labelled / split).rglob("*.*"))
        write_csv(labelled, split, [f"{path},{label}" for path, label in zip(paths, labels, strict=False)])
    if divider is None:
        assert len(list_files(csv_settings(labelled))[0].classes) == len(labels)
        return
    assert f"TRAIN_TASK=multilabel and TRAIN_LABEL_SEPARATOR='{divider}'" in refusal(
        list_files, csv_settings(labelled), match="looks like several labels"
    )


@pytest.mark.parametrize(
    ("cells", "said"), [(["", "", ""], "no image has a label"), (["a", "b", "a;b"], "TRAIN_LABEL_SEPARATOR=';'")]
)
def test_labels_that_a_separator_hides_are_refused(labelled: Path, cells: list[str], said: str) -> None:
    paths = sorted(path.relative_to(labelled) for path in (labelled / "train").rglob("*.*"))
    for split in ("train", "test"):
        write_csv(labelled, split, [f"{path},{cell}" for path, cell in zip(paths, cells, strict=False)])
    refusal(list_files, csv_settings(labelled, task="multilabel"), match=re.escape(said))


def test_columns_in_another_order_are_refused(labelled: Path) -> None:
    for split, head in (("train", "file,a,b"), ("test", "file,b,a")):
        write_csv(labelled, split, [f"{split}/class0/000.jpg,1,0"], head)
    refusal(
        list_files,
        csv_settings(labelled, task="multilabel"),
        match=r"test\.csv: its first line names other columns than train\.csv",
    )
