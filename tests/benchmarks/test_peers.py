"""What people use today trains the same for real, and what fails is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.runner import NotMeasuredError
from tests.conftest import PYTHON, paint

pytestmark = pytest.mark.launch


@pytest.mark.slow_except("ours")
@pytest.mark.parametrize("peer", ["plain loop", "ours"])
def test_peer_returns_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peer: str) -> None:
    pytest.importorskip("torchvision")
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
