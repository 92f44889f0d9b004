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

from entrypoint.cli.commands.train_run import layout_of
from entrypoint.plan.display import Layout


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
        ({"TERM": "xterm"}, Layout(80, color=True, verbose=False)),
        ({"TERM": "dumb"}, Layout(80, verbose=False)),
        ({}, Layout(80, verbose=False)),
        ({"TERM": "xterm", "NO_COLOR": "1"}, Layout(80, verbose=False)),
        ({"TERM": "xterm", "NO_COLOR": ""}, Layout(80, color=True, verbose=False)),
        ({"NO_COLOR": "1", "CLICOLOR_FORCE": "1"}, Layout(80, verbose=False)),
        ({"COLUMNS": "70"}, Layout(70, verbose=False)),
        ({"COLUMNS": "9"}, Layout(60, verbose=False)),
        ({"COLUMNS": "999"}, Layout(140, verbose=False)),
        ({"COLUMNS": "wide"}, Layout(80, verbose=False)),
    ],
)
def test_terminal_decides(terminal: TextIO, environ: Mapping[str, str], layout: Layout) -> None:
    assert layout_of(terminal, environ) == layout


@pytest.mark.parametrize(
    ("environ", "layout"),
    [
        ({"TERM": "xterm", "COLUMNS": "70"}, Layout(100, verbose=False)),
        ({"CLICOLOR_FORCE": "1"}, Layout(100, color=True, verbose=False)),
        ({"CLICOLOR_FORCE": "0"}, Layout(100, verbose=False)),
    ],
)
def test_file_has_one_width(tmp_path: Path, environ: Mapping[str, str], layout: Layout) -> None:
    with (tmp_path / "plan.txt").open("w") as stream:
        assert layout_of(stream, environ) == layout
