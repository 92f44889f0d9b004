"""What people use today trains the same for real, and what fails is reported."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.peers import __main__ as peers
from benchmarks.tables import Table
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
    rates, commands = Table("rates", "images/s"), Table("commands", "s")
    peers.start(next(one for one in peers.PEERS[1] if one.name == peer), "cnn", 1, data, rates, commands)
    assert rates.missing == {}
    assert rates.samples[peer][0] > 0
    assert commands.samples[peer][0] > 0


def test_failed_peer_is_not_run_again(tmp_path: Path) -> None:
    rates, commands = Table("rates", "images/s"), Table("commands", "s")
    missing = {"TRAIN_DATA_DIR": str(tmp_path / "nothing")}
    peers.start(peers.Peer("plain loop", (PYTHON, "-m", "benchmarks.peers.plain")), "cnn", 1, missing, rates, commands)
    assert rates.missing["plain loop"].startswith("ended with 1: FileNotFoundError")
    assert rates.samples == commands.samples == {}
    assert (
        subprocess.run([PYTHON, "-m", "benchmarks.peers", "--help"], check=False, capture_output=True).returncode == 0
    )
