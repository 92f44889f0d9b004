"""Paths that a user may name, and that no file system has."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from entrypoint.core import files


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


# Where a path of a kind is, if it has another name than its kind, and what makes it.
PLACES = {"long name": "x" * 300, "below a file": "a/b", "device": "/dev/zero"}
MAKERS: dict[str, Callable[[Path], object]] = {
    "file": lambda path: path.write_bytes(b"text \xff"),
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "socket": bind_socket,
    "loop": lambda path: path.symlink_to(path),
    "below a file": lambda path: path.parent.write_text(""),
}
# exists, is_file, is_folder, and what opening it says.
KINDS = {
    "file": (True, True, False, ""),
    "folder": (True, False, True, "Is a directory"),
    "fifo": (True, False, False, "Not a regular file"),
    "socket": (True, False, False, "No such device or address"),
    "device": (True, False, False, "Not a regular file"),
    "loop": (False, False, False, "Too many levels of symbolic links"),
    "long name": (False, False, False, "File name too long"),
    "below a file": (False, False, False, "Not a directory"),
    "nothing": (False, False, False, "No such file or directory"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_path_has_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.chdir(tmp_path)
    path, (*answers, said) = tmp_path / PLACES.get(kind, kind), KINDS[kind]
    if kind in MAKERS:
        MAKERS[kind](path)
    assert [files.exists(path), files.is_file(path), files.is_folder(path)] == answers
    assert files.resolve(path).is_absolute()
    if not said:
        assert files.read_regular(path) == "text \ufffd"
        return
    with pytest.raises(OSError, match=said):
        files.read_regular(path)


def test_large_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(files.MAX_TEXT_BYTES + 1)
    with pytest.raises(OSError, match="File too large"):
        files.read_regular(tmp_path / "sparse")


def test_refused_file_is_closed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="Not a regular file"):
        files.open_regular(tmp_path / "fifo")
    assert os.listdir("/proc/self/fd") == before


def test_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert files.working_folder() == tmp_path


@pytest.mark.usefixtures("removed_folder")
def test_working_folder_that_was_removed() -> None:
    assert files.working_folder() is None
    assert files.resolve(Path("x")) == Path("x")
    assert not files.exists("x")
