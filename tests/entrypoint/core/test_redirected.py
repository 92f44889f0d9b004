"""What is written past Python's streams goes elsewhere meanwhile, and only meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.core.console import STDERR, STDOUT, redirected


@pytest.mark.parametrize("number", [STDOUT, STDERR])
def test_redirected_restores_descriptor_after_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: int
) -> None:
    place = tmp_path / "said"
    with place.open("wb") as to, pytest.raises(OSError, match="Bad file descriptor"), redirected(number, to.fileno()):
        os.write(os.write(number, b"away") - 5, b"")  # writes, then fails
    os.write(number, b"here")
    assert place.read_bytes() == b"away"
    assert capfd.readouterr()[number - 1] == "here"
