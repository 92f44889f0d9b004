"""Paths in two buffers: every name comes back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from train.data.sources.image_file import FileList

NAMES = ("a/1.png", "a/sub/2.png", "ü/ß.jpg", "b/line\nbreak.png", os.fsdecode(b"b/\xff\xfe.png"), "b/ .png")


@pytest.mark.parametrize("folder", [Path("train"), Path("/data/train"), Path("../änderung/train"), Path(), Path("/")])
def test_file_list_returns_the_paths_it_was_given(folder: Path) -> None:
    files = FileList(folder)
    for name in NAMES:
        files.append(folder / name)
    assert len(files) == len(NAMES)
    assert list(files) == [folder / name for name in NAMES]
    assert [files.relative(row) for row in range(len(NAMES))] == list(NAMES)
    assert files[len(NAMES) - 1] == folder / NAMES[-1]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_file_list_row_after_the_last_raises(count: int) -> None:
    files = FileList(Path("train"))
    for name in NAMES[:count]:
        files.append(Path("train", name))
    with pytest.raises(IndexError):
        files[count]
