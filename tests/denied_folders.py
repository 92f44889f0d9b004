"""Folders that nobody may list, root neither."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import pytest


def deny(folder: Path) -> NoReturn:
    """Raise what the kernel says of a folder without permission."""
    raise PermissionError(13, "Permission denied", str(folder))


def deny_listing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let nobody list a folder by its path; pytest removes it by a descriptor."""
    listed = os.scandir

    def scandir(path: Any = ".") -> Any:
        return deny(folder) if not isinstance(path, int) and Path(path) == folder else listed(path)

    monkeypatch.setattr("os.scandir", scandir)
