"""What people use today trains and loads the same for real, and what fails is reported."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.runner import NotMeasuredError
from benchmarks.stream import __main__ as stream, data, measure
from tests.conftest import PYTHON, paint

pytestmark = pytest.mark.launch


@pytest.mark.slow_except("ours")
@pytest.mark.parametrize("peer", ["plain loop", "ours"])
@pytest.mark.usefixtures("torchvision")
def test_peer_returns_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    monkeypatch.setitem(peers.MODELS, "cnn", (8, 12))
    for part in ("train", "test"):
        paint(tmp_path / part, classes=10, each=6, size=(32, 32))
    data = {"TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(tmp_path), "TRAIN_CACHE_DIR": str(tmp_path / "c")}
    rate, seconds = peers.start(next(one for one in peers.PEERS[1] if one.name == peer), "cnn", 1, data)
    assert rate > 0
    assert seconds > 0


def test_failed_peer_has_a_reason(tmp_path: Path) -> None:
    missing = {"TRAIN_DATA_DIR": str(tmp_path / "nothing")}
    with pytest.raises(NotMeasuredError, match=r"^ended with 1: FileNotFoundError"):
        peers.start(peers.Peer("plain loop", (PYTHON, "-m", "benchmarks.peers.plain")), "cnn", 1, missing)
    with pytest.raises(NotMeasuredError, match=r"^no_such_module is not installed$"):
        peers.start(peers.Peer("x", (PYTHON,), "no_such_module"), "cnn", 1, missing)


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
@pytest.mark.usefixtures("torchvision")
def test_loader_returns_speed_and_memory(small_set: Path, loader: str, task: str) -> None:
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
