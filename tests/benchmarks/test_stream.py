"""The benchmark of loaders, on a few small files."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.runner import NotMeasuredError
from benchmarks.stream import __main__ as stream
from benchmarks.stream import data, measure

pytestmark = pytest.mark.launch


@pytest.fixture
def small_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(data.SETS, "96x96", (96, 96, 80, 16, 90))
    return data.make_folder(tmp_path, "96x96")


def test_set_is_made_once(small_set: Path, tmp_path: Path) -> None:
    files = sorted(small_set.glob("*/*/*.jpg"))
    assert len(files) == 96
    times = [path.stat().st_mtime_ns for path in files]
    assert data.make_folder(tmp_path, "96x96") == small_set
    assert [path.stat().st_mtime_ns for path in files] == times


@pytest.mark.slow_except("ours-train")
@pytest.mark.parametrize(
    ("loader", "task"),
    [
        ("ours", "train"),
        ("ours", "evaluate"),
        ("torchvision's reference", "train"),
        ("torchvision decode_jpeg", "evaluate"),
    ],
)
def test_loader_returns_speed_and_memory(small_set: Path, loader: str, task: str) -> None:
    pytest.importorskip("torchvision")
    found = stream.measure(loader, small_set, task, 32, 0.5)
    assert found[0] > 0
    assert found[1] > 50


@pytest.mark.parametrize("batch_seconds", [0.01, 0.09, 0.3])
def test_memory_is_measured_however_slow_the_batches_are(batch_seconds: float) -> None:
    def batches() -> Iterator[int]:
        while True:
            time.sleep(batch_seconds)
            yield 8

    rate, memory = measure.measure(batches(), 0.1)
    assert memory > 1
    assert 0 < rate <= 8 / batch_seconds


def test_loader_that_is_not_there_says_so(small_set: Path) -> None:
    with pytest.raises(NotMeasuredError, match=r"^KeyError: 'no such loader'$"):
        stream.measure("no such loader", small_set, "train", 32, 0.5)
