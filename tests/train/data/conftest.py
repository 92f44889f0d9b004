"""Fixtures of the tests of data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.train.data.shard_files import pack


@pytest.fixture
def packed(image_folder: Path, tmp_path: Path) -> Path:
    """Return shards of the painted images: three of train, two of test, and classes.txt."""
    return pack(image_folder, tmp_path / "packed")
