"""A run says which class each of its outputs is, and does not go on with other ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Entrypoint
from tests.train.given import imagefolder
from train.checkpoint.metadata import read_metadata

pytestmark = pytest.mark.launch
NAMES = ["class0", "class1", "class2"]


@pytest.mark.slow_except("ddp")
@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_run_leaves_the_names_of_its_classes(entrypoint: Entrypoint, image_folder: Path, parallelism: str) -> None:
    summary = entrypoint.train(env=imagefolder(image_folder, TRAIN_EPOCHS="1", TRAIN_PARALLELISM=parallelism))
    assert summary["classes"] == NAMES
    (path,) = (entrypoint.folder / "runs/latest/checkpoint").glob("step-*")
    assert list(read_metadata(path)[0].data.classes) == NAMES


def rename_class(folder: Path) -> None:
    """Rename the first class, so that it becomes the last one."""
    for split in ("train", "test"):
        (folder / split / "class0").rename(folder / split / "zebra")


def add_class(folder: Path) -> None:
    for split in ("train", "test"):
        (folder / split / "class3").symlink_to("class2")


@pytest.mark.parametrize(
    ("change", "said", "allowed"),
    [
        (rename_class, "saved with other data: class 0 of 3 was class0, is class1 of 3.", 2),
        pytest.param(
            add_class, "saved with other data: class 3 of 3 was none, is class3 of 4, ", 2, marks=pytest.mark.slow
        ),
    ],
)
def test_resume_with_other_classes_is_refused(
    entrypoint: Entrypoint, image_folder: Path, change: Callable[[Path], None], said: str, allowed: int
) -> None:
    env = imagefolder(image_folder, TRAIN_RUN_NAME="run", TRAIN_EPOCHS="1", LAUNCH_QUIET="1")
    entrypoint.train(env=env)
    change(image_folder)
    again = env | {"TRAIN_RESUME": "auto"}
    result = entrypoint("train", env=again)
    assert result.code == 2
    (line,) = result.error_lines
    assert said in line
    assert entrypoint("train", env=again | {"TRAIN_RESUME_ALLOW_CHANGED": "1"}).code == allowed
