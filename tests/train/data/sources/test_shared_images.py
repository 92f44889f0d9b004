"""Test images that are training images too, under whatever name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.conftest import paint
from train.data.sources import image_list
from train.data.sources.image_folder import list_splits
from train.data.sources.image_list import count_shared


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    paint(tmp_path / "train", classes=2, each=6)
    paint(tmp_path / "test", classes=2, each=3)
    for index, file in enumerate(sorted((tmp_path / "test").rglob("*.*"))):
        file.write_bytes(file.read_bytes() + bytes([index]))  # an image that no other is
    return tmp_path


def counts(folder: Path) -> tuple[int, int]:
    return count_shared(*list_splits(folder, "error"))


def test_other_images_are_not_shared(folder: Path) -> None:
    assert counts(folder) == (0, 6)


@pytest.mark.parametrize("limit", [5_000, 0])
def test_copy_of_train_is_shared(folder: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(image_list, "MAX_SIZES", limit)
    shutil.rmtree(folder / "test")
    shutil.copytree(folder / "train", folder / "test")
    assert counts(folder) == (12, 12)


def test_renamed_copy_in_another_class_is_shared(folder: Path) -> None:
    first, *_ = sorted((folder / "train").rglob("*.*"))
    other = sorted(path for path in (folder / "test").iterdir())[-1]
    shutil.copy(first, other / f"renamed{first.suffix}")
    assert counts(folder) == (1, 7)
