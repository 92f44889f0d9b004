"""What goes wrong under a run ends it in one line, with the right code, and the checkpoints before it whole."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, paint
from tests.train.given import SMALL
from tests.train.started import Started
from train.checkpoint.folder import list_newest_first
from train.checkpoint.resume import load_first_valid

pytestmark = pytest.mark.launch
ENDLESS = {"TRAIN_EPOCHS": "100000", "TRAIN_TENSORBOARD": "0", "TRAIN_RUN_NAME": "run"}


@pytest.fixture
def small_disk(entrypoint: Entrypoint) -> Iterator[Path]:
    """A file system of 6 MiB as the output folder."""
    folder = entrypoint.folder / "runs"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs (root)")
    yield folder
    subprocess.run(["chattr", "-i", folder / "run/checkpoint"], check=False, capture_output=True)
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path) -> None:
    with (folder / "fill").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def forbid(folder: Path) -> None:
    """Let not even root make files there, or remove them."""
    subprocess.run(["chattr", "+i", folder / "run/checkpoint"], check=True)


def remove(folder: Path) -> None:
    """Remove the run in one step: the checkpoint of an epoch that ends meanwhile would make its folder again."""
    (folder / "run").rename(folder / "gone")
    shutil.rmtree(folder / "gone")


def error_lines(err: str) -> list[str]:
    """Return the lines of standard error, without those of metrics that a full disk does not take."""
    return [line for line in err.splitlines() if not line.endswith("; the training goes on without it")]


@pytest.mark.parametrize(
    ("cause", "more", "said"),
    [
        (
            None,
            {"TRAIN_KEEP_CHECKPOINTS": "100"},
            "run/checkpoint: cannot be written (No space left on device). Free disk space",
        ),
        pytest.param(fill, {}, "cannot be written (No space left on device). Free disk space", marks=pytest.mark.slow),
        (remove, {}, "run/checkpoint: cannot be written (No such file or directory). Make it writable"),
        pytest.param(
            forbid,
            {},
            "run/checkpoint: cannot be written (Operation not permitted). Make it writable",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unwritable_disk_ends_run(
    entrypoint: Entrypoint, small_disk: Path, cause: Callable[[Path], None] | None, more: dict[str, str], said: str
) -> None:
    run = Started(entrypoint, ENDLESS | SMALL | more)
    run.wait_for("epoch 2/")
    if cause:
        cause(small_disk)
    _, err = run.ended_with(ExitCode.MACHINE)
    assert len(error_lines(err)) == 1
    assert said in err
    kept = list_newest_first(small_disk / "run/checkpoint")
    for path in kept:
        assert not load_first_valid([path], {}, changed=True).skipped
    assert bool(kept) is (cause is not remove)
    # Forbidden during a save, what is half written cannot be removed either, until the run goes on.
    assert cause is forbid or not list((small_disk / "run/checkpoint").glob(".*"))


@pytest.mark.slow
def test_half_written_file_of_a_save_is_removed_on_resume(entrypoint: Entrypoint, small_disk: Path) -> None:
    saved = small_disk / "run/checkpoint"
    env = SMALL | {"TRAIN_RUN_NAME": "run", "TRAIN_EPOCHS": "1"}
    first = entrypoint.train(env=env)
    half = saved / ".step-000000020"
    half.mkdir()
    (half / "model.safetensors").write_text("half")
    forbid(small_disk)
    assert "cannot be written (Operation not permitted)" in entrypoint.error_line(
        "train", env=env | {"TRAIN_RESUME": "auto"}
    )
    subprocess.run(["chattr", "-i", saved], check=True)
    assert entrypoint.train(env=env | {"TRAIN_RESUME": "auto"})["weights_sha256"] == first["weights_sha256"]
    assert not half.exists()


@pytest.fixture
def quota(entrypoint: Entrypoint) -> Iterator[Path]:
    """The output folder on a btrfs whose quota leaves a subvolume 6 MiB."""
    if not shutil.which("mkfs.btrfs") or os.getuid():
        pytest.skip("needs root and btrfs-progs, to make a file system with a quota")
    image, folder, runs = (entrypoint.folder / name for name in ("image", "disk", "runs"))
    with image.open("wb") as file:
        file.truncate(256 << 20)
    folder.mkdir()
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, folder], check=False).returncode:
        pytest.skip("needs the right to mount a file (root, and a loop device)")
    try:
        for words in (("quota", "enable", folder), ("subvolume", "create", folder / "runs")):
            subprocess.run(["btrfs", *words], check=True, capture_output=True)
        subprocess.run(["btrfs", "qgroup", "limit", "6M", folder / "runs"], check=True)
        runs.symlink_to(folder / "runs")
        yield runs
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def test_disk_quota_ends_run_with_valid_checkpoints(entrypoint: Entrypoint, quota: Path) -> None:
    run = Started(entrypoint, ENDLESS | SMALL | {"TRAIN_KEEP_CHECKPOINTS": "100"})
    _, err = run.ended_with(ExitCode.MACHINE)
    assert len(error_lines(err)) == 1
    assert "cannot be written (Disk quota exceeded)" in err
    kept = list_newest_first(quota / "run/checkpoint")
    assert kept
    for path in kept:
        assert not load_first_valid([path], {}, changed=True).skipped


@pytest.fixture
def streamed(tmp_path: Path) -> dict[str, str]:
    """A set that is streamed by threads."""
    paint(tmp_path / "images/train", each=40)
    paint(tmp_path / "images/test", each=4)
    return {
        "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": str(tmp_path / "images"), "TRAIN_DATA_SOURCE": "stream",
        "TRAIN_BATCH_SIZE": "4", "TRAIN_NUM_WORKERS": "2",
    }  # fmt: skip


def test_deleted_images_end_run(entrypoint: Entrypoint, streamed: dict[str, str]) -> None:
    run = Started(entrypoint, ENDLESS | streamed)
    run.wait_for("epoch 2/")
    for one in Path(streamed["TRAIN_DATA_DIR"]).glob("train/*/*"):
        one.unlink()
    _, err = run.ended_with(ExitCode.USAGE)
    assert len(err.splitlines()) == 1, err
    assert "No such file or directory" in err
    assert "set TRAIN_ON_UNREADABLE_IMAGE=skip" in err


def test_streaming_needs_no_shared_memory(entrypoint: Entrypoint, streamed: dict[str, str]) -> None:
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a mount namespace (root)")
    own = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")
    # With the default rate batches of four images diverge on some CPUs.
    run = Started(entrypoint, ENDLESS | streamed | {"TRAIN_EPOCHS": "2", "TRAIN_LR": "0.001"}, *own)
    run.ended_with(0)
