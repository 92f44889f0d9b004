"""Checkpoints: whole or not there, of these settings or refused, and never run."""

from __future__ import annotations

import os
import pickle
import resource
from pathlib import Path

import pytest
import torch

from entrypoint.errors import Refused
from train.checkpoint import Checkpoint, load, newest, save

SETTINGS = {"batch_size": 64, "epochs": 3, "keep": 2}


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(1, step, 2.5, {"w": torch.full((3,), float(step))}, {"state": {}}, SETTINGS)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(7), keep=2)
    found = load(path, SETTINGS)
    assert (found.epoch, found.step, found.seconds) == (1, 7, 2.5)
    assert torch.equal(found.model["w"], torch.full((3,), 7.0))


def test_the_newest_are_kept_and_nothing_half_written(tmp_path: Path) -> None:
    for step in (1, 20, 300):
        save(tmp_path / "checkpoint", checkpoint(step), keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-000000020.pt", "step-000000300.pt"]
    assert newest(tmp_path / "checkpoint") == tmp_path / "checkpoint/step-000000300.pt"


def test_a_disk_that_is_full_is_an_os_error_and_keeps_what_was_there(tmp_path: Path) -> None:
    before = save(tmp_path / "checkpoint", checkpoint(1), keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "checkpoint", checkpoint(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "checkpoint").iterdir()) == [before]


def test_other_settings_are_refused_with_what_differs(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(1), keep=2)
    with pytest.raises(Refused, match="TRAIN_BATCH_SIZE was 64, is 32"):
        load(path, SETTINGS | {"batch_size": 32})
    load(path, SETTINGS | {"keep": 9})


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch hostile-was-here",)


def test_a_hostile_pickle_does_nothing_but_give_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Hostile()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(Hostile()))
    for name in ("a.pt", "b.pt"):
        with pytest.raises(Refused, match="cannot be read as a checkpoint"):
            load(tmp_path / name, SETTINGS)
    assert not (tmp_path / "hostile-was-here").exists()


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut short"])
def test_a_foreign_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(Refused) as error:
        load(tmp_path / "x.pt", SETTINGS)
    assert len(str(error.value).splitlines()) == 1
