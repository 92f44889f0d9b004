"""Data sets in folders that cannot be written, and caches whose disk is full, with real mounts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import PYTHON, Entrypoint, paint
from tests.factories import write_fashion_mnist
from tests.train.given import imagefolder

pytestmark = pytest.mark.launch


def mounted(*commands: str) -> tuple[str, ...]:
    """Return a command that mounts something in a namespace of its own, then runs the entrypoint."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace (root)")
    script = " && ".join((*commands, 'exec "$@"'))
    return ("unshare", "-m", "sh", "-c", script, "sh", PYTHON, "-m", "entrypoint")


@pytest.mark.slow_except("1")
@pytest.mark.parametrize("download", ["0", "1"])
def test_dataset_in_a_read_only_folder_trains(entrypoint: Entrypoint, tmp_path: Path, download: str) -> None:
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    data = tmp_path / "data"
    write_fashion_mnist(data, 128, 64)
    read_only = mounted(f"mount --bind {data} {data}", f"mount -o remount,bind,ro {data}")
    env = {"TRAIN_DATASET": "fashion-mnist", "TRAIN_DATA_DIR": str(data), "TRAIN_DOWNLOAD": download}
    result = entrypoint("train", env={**env, "TRAIN_EPOCHS": "1"}, command=read_only)
    assert result.code == 0, result.err
    assert entrypoint.summary()["test_images"] == 64
    assert not (data / ".download.lock").exists()


def test_full_disk_of_the_image_cache_is_one_line(entrypoint: Entrypoint, tmp_path: Path) -> None:
    for split in ("train", "test"):
        paint(tmp_path / "images" / split, each=100, size=(64, 64))
    cache = tmp_path / "cache"
    cache.mkdir()
    small = mounted(f"mount -t tmpfs -o size=2m tmpfs {cache}")
    env = imagefolder(tmp_path / "images", TRAIN_CACHE_DIR=str(cache), LAUNCH_QUIET="1")
    result = entrypoint("train", env=env, command=small)
    assert result.code == ExitCode.USAGE, result.err
    (line,) = result.err.splitlines()
    assert line.startswith(f"entrypoint: error: {cache}/images-")
    assert line.endswith(": the image cache cannot be written (No space left on device); set TRAIN_CACHE_DIR")
