"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.core.files import atomic_open, atomic_write_text


def test_atomic_open_failure_keeps_old_content(tmp_path: Path) -> None:
    atomic_write_text(tmp_path / "x", "old")

    def half() -> None:
        with atomic_open(tmp_path / "x") as file:
            file.write(b"half")
            assert (tmp_path / "x").read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
