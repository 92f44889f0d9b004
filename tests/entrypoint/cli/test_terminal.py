"""The width and the colors of text follow the terminal and the variables that users set for it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

import pytest

from entrypoint.cli.terminal import Layout, layout_of


@pytest.fixture
def terminal() -> Iterator[TextIO]:
    """Return a terminal of 80 columns."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(writer, "w") as stream:
        yield stream
    os.close(reader)


@pytest.mark.parametrize(
    ("environ", "layout"),
    [
        ({"TERM": "xterm"}, Layout(80, color=True)),
        ({"TERM": "dumb"}, Layout(80)),
        ({}, Layout(80)),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Layout(80)),
        ({"TERM": "xterm", "NO_COLOR": ""}, Layout(80, color=True)),
        ({"NO_COLOR": "1", "CLICOLOR_FORCE": "1"}, Layout(80)),
        ({"COLUMNS": "70"}, Layout(70)),
        ({"COLUMNS": "9"}, Layout(60)),
        ({"COLUMNS": "999"}, Layout(140)),
        ({"COLUMNS": "wide"}, Layout(80)),
    ],
)
def test_terminal_decides(terminal: TextIO, environ: Mapping[str, str], layout: Layout) -> None:
    assert layout_of(terminal, environ) == layout


@pytest.mark.parametrize(
    ("environ", "layout"),
    [
        ({"TERM": "xterm", "COLUMNS": "70"}, Layout(100)),
        ({"CLICOLOR_FORCE": "1"}, Layout(100, color=True)),
        ({"CLICOLOR_FORCE": "0"}, Layout(100)),
    ],
)
def test_file_has_one_width(tmp_path: Path, environ: Mapping[str, str], layout: Layout) -> None:
    with (tmp_path / "plan.txt").open("w") as stream:
        assert layout_of(stream, environ) == layout
