"""What tests of several folders ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.train.object_storage import s3_server


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A place in object storage: a folder, or a bucket of a real server."""
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/stored"
        return
    with s3_server("bucket"):
        yield "s3://bucket/stored"
