"""Which formats are read, whatever a file's name is: none that starts another program."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import script
from train.data.decoding.decoder import read_image
from train.data.decoding.pixel_values import known_formats, open_with_pillow
from train.data.sources.image_list import UnreadableImage

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def test_other_format_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path, "gs", f"#!/bin/sh\ntouch {tmp_path}/started\n").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "x.png").write_bytes(POSTSCRIPT)
    result = read_image(tmp_path / "x.png", (8, 8, 3))
    assert isinstance(result, UnreadableImage)
    assert result.reason == "not an image"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("name", known_formats())
def test_known_format_is_read(name: str) -> None:
    file = BytesIO()
    Image.new("RGB", (8, 6), (200, 10, 10)).save(file, name)
    with open_with_pillow(BytesIO(file.getvalue())) as image:
        assert image.size == (8, 6)
