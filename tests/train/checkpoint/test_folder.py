"""Only names that a run writes are its checkpoints; the newest is by step."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.train.checkpoint.saved import SETTINGS, save
from train.checkpoint.folder import BEST, best_checkpoint, list_newest_first, newest, remove_partial
from train.checkpoint.metadata import METADATA_FILE
from train.checkpoint.resume import load_first_valid
from train.checkpoint.tensor_files import CheckpointReader


def steps(folder: Path) -> list[int]:
    return [int(path.name[5:]) for path in list_newest_first(folder)]


@pytest.mark.parametrize("saved", [(1, 20, 300), (999_999_999, 1_000_000_000, 10_000_000_000)])
def test_save_keeps_newest_by_number_and_no_partial_files(tmp_path: Path, saved: tuple[int, ...]) -> None:
    for step in saved:
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_newest_first(tmp_path)] == [f"step-{step:09d}" for step in saved[:0:-1]]
    assert len(list(tmp_path.iterdir())) == 2
    assert newest(tmp_path) == tmp_path / f"step-{saved[-1]:09d}"


@pytest.mark.parametrize("number", [None, errno.EPERM, errno.EOPNOTSUPP])
def test_save_keeps_best_and_newest_with_links_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int | None
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number or 0))

    if number:
        monkeypatch.setattr(Path, "symlink_to", refuse)
    for step in range(1, 6):
        save(tmp_path, step, keep=2, best=step == 2)
    assert steps(tmp_path) == [5, 4, 2]
    assert CheckpointReader(best_checkpoint(tmp_path)).metadata.step == 2
    assert (tmp_path / BEST).is_symlink() is (number is None)
    save(tmp_path, 6, keep=2, best=True)
    assert steps(tmp_path) == [6, 5]
    assert CheckpointReader(best_checkpoint(tmp_path)).metadata.step == 6


def test_folder_that_cannot_be_synced_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    save(tmp_path, 1, keep=2)
    assert steps(tmp_path) == [1]


# What users keep next to a run's own checkpoints.
USERS_NAMES = (
    *("step-best-for-paper", "step-before-lr-change", "step-000000010-copy", "step-10", "step-000000099.bak"),
    *("Step-000000099", "my step-000000099", ".step-mine", ".best.txt", "step-000000099 ", "notes.txt"),
)


@pytest.mark.parametrize("as_link", [False, True])
def test_copies_of_users_are_left_alone(tmp_path: Path, as_link: bool) -> None:
    folder, elsewhere = tmp_path / "checkpoint", tmp_path / "elsewhere"
    first = save(folder, 10, keep=1)
    shutil.copytree(first, elsewhere)
    for name in USERS_NAMES:
        shutil.copytree(first, folder / name)
    if as_link:
        (folder / "step-000000098").symlink_to(elsewhere)
    remove_partial(folder)
    assert steps(folder) == [10]
    for step in (11, 12):
        saved = save(folder, step, keep=1)
        assert newest(folder) == saved
    assert steps(folder) == [12]
    assert all((folder / name / METADATA_FILE).is_file() for name in USERS_NAMES)


def test_copy_under_another_step_is_the_users(tmp_path: Path) -> None:
    first = save(tmp_path, 10, keep=1)
    shutil.copytree(first, tmp_path / "step-000000099")
    for step in (909, 919):
        (tmp_path / f"step-{step:09d}").mkdir()
        (tmp_path / f"step-{step:09d}/notes.txt").write_text("mine")
    for step in (11, 12):
        save(tmp_path, step, keep=1)
    assert steps(tmp_path) == [919, 909, 99, 12]
    start = load_first_valid(list_newest_first(tmp_path), SETTINGS, changed=False)
    assert start.step == 12
    assert "its name says step 99 and checkpoint.json says step 10" in start.skipped[-1]


def test_what_was_just_written_is_never_removed(tmp_path: Path) -> None:
    for step in (80, 90):
        save(tmp_path, step)
    saved = save(tmp_path, 10, keep=1)
    assert saved.is_dir()
    assert steps(tmp_path) == [90, 10]


def test_partial_checkpoints_are_removed_replaced_ones_kept(tmp_path: Path) -> None:
    kept, other = save(tmp_path, 1), save(tmp_path, 2)
    other.rename(tmp_path / ".step-000000002.replaced")
    shutil.copytree(kept, tmp_path / ".step-000000001.replaced")
    (tmp_path / ".step-000000003").mkdir()
    (tmp_path / ".step-000000003/model.safetensors").write_bytes(b"half")
    (tmp_path / ".best.4711").symlink_to("step-000000001")
    (tmp_path / ".nfs0001").write_text("")
    remove_partial(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".nfs0001", "step-000000001", "step-000000002"]
    assert CheckpointReader(other).metadata.step == 2
