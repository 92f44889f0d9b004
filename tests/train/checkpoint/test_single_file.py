"""Checkpoints: whole or not there, of these settings or refused, and never run."""

from __future__ import annotations

import os
import pickle
import random
import resource
from pathlib import Path

import pytest
import torch

from entrypoint.core.atomic_files import SEAL_BYTES, checksum_trailer
from entrypoint.core.errors import UserError
from tests.factories import HostilePickle
from train.checkpoint.single_file import (
    Checkpoint,
    CorruptCheckpoint,
    corrupt_error,
    list_newest_first,
    load,
    load_first_valid,
    newest,
    save,
)

SETTINGS = {"batch_size": 64, "epochs": 3, "keep_checkpoints": 2}


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(1, step, 2.5, {"w": torch.full((3,), float(step))}, {"state": {}}, SETTINGS)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(7), keep=2)
    found = load(path, SETTINGS)
    assert (found.epoch, found.step, found.seconds) == (1, 7, 2.5)
    assert torch.equal(found.model["w"], torch.full((3,), 7.0))


def test_save_keeps_newest_and_no_partial_files(tmp_path: Path) -> None:
    for step in (1, 20, 300):
        save(tmp_path / "checkpoint", checkpoint(step), keep=2)
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-000000020.pt", "step-000000300.pt"]
    assert newest(tmp_path / "checkpoint") == tmp_path / "checkpoint/step-000000300.pt"


def test_full_disk_raises_os_error_and_keeps_old_checkpoint(tmp_path: Path) -> None:
    before = save(tmp_path / "checkpoint", checkpoint(1), keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "checkpoint", checkpoint(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "checkpoint").iterdir()) == [before]


def test_load_with_other_settings_raises(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(1), keep=2)
    with pytest.raises(UserError, match="TRAIN_BATCH_SIZE was 64, is 32"):
        load(path, SETTINGS | {"batch_size": 32})
    load(path, SETTINGS | {"keep_checkpoints": 9})
    assert load(path, SETTINGS | {"batch_size": 32}, changed=True).step == 1


def test_load_hostile_pickle_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": HostilePickle()}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(pickle.dumps(HostilePickle()))
    for name in ("a.pt", "b.pt"):  # as a hostile hand would leave them: with a checksum that is right
        content = (tmp_path / name).read_bytes()
        (tmp_path / f"sealed-{name}").write_bytes(content + checksum_trailer(content))
    for name in ("a.pt", "b.pt", "sealed-a.pt", "sealed-b.pt"):
        with pytest.raises(UserError, match="cannot be read as a checkpoint"):
            load(tmp_path / name, SETTINGS)
    assert not (tmp_path / "hostile-was-here").exists()


def test_save_keeps_best_and_newest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    for step in range(1, 6):
        save(folder, checkpoint(step), keep=2, best=step == 2)
    assert [path.name[5:14] for path in list_newest_first(folder)] == ["000000005", "000000004", "000000002"]
    assert (folder / "best.pt").resolve().name == "step-000000002.pt"
    assert load(folder / "best.pt", SETTINGS).step == 2
    save(folder, checkpoint(6), keep=2, best=True)
    assert [path.name[5:14] for path in list_newest_first(folder)] == ["000000006", "000000005"]
    assert load(folder / "best.pt", SETTINGS).step == 6


def test_load_flipped_bit_raises(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(7), keep=2)
    data = bytearray(path.read_bytes())
    data[data.index(torch.full((3,), 7.0).numpy().tobytes()) + 1] ^= 1
    path.write_bytes(data)
    assert not torch.equal(torch.load(path, weights_only=True)["model"]["w"], torch.full((3,), 7.0))
    with pytest.raises(
        UserError, match=r"cannot be read as a checkpoint \(its checksum does not match: it was changed or"
    ):
        load(path, SETTINGS)


def test_load_first_valid_skips_and_names_corrupt_checkpoints(tmp_path: Path) -> None:
    paths = [save(tmp_path / "checkpoint", checkpoint(step), keep=9) for step in (1, 2, 3)]
    paths[2].write_bytes(paths[2].read_bytes()[:-7])
    paths[1].write_bytes(b"")
    start = load_first_valid(list_newest_first(tmp_path / "checkpoint"), SETTINGS, changed=False)
    assert (start.path, start.saved.step) == (paths[0], 1)
    assert [line.split(" (")[0] for line in start.skipped] == [
        f"skipped {path}: cannot be read as a checkpoint" for path in (paths[2], paths[1])
    ]
    with pytest.raises(UserError, match=r"TRAIN_BATCH_SIZE was 64, is 1\. Restore"):
        load_first_valid(paths, SETTINGS | {"batch_size": 1}, changed=False)
    with pytest.raises(CorruptCheckpoint, match="Set TRAIN_RESUME to another checkpoint"):
        load_first_valid(paths[2:], SETTINGS, changed=False)
    with pytest.raises(UserError, match=r"; 1 older checkpoints are corrupt too\. Set TRAIN_RESUME=off to"):
        load_first_valid(paths[:0:-1], SETTINGS, changed=False)


def test_corrupt_error_pickles(tmp_path: Path) -> None:
    refused = corrupt_error(tmp_path, ValueError("cut"))
    again = pickle.loads(pickle.dumps(refused))
    assert (str(again), again.reason, again.code) == (str(refused), refused.reason, refused.code)


CORRUPTIONS = int(os.environ.get("CORRUPTIONS", "1000"))


def test_load_any_damage_raises(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", checkpoint(7), keep=2)
    whole, draw = path.read_bytes(), random.Random(0)
    for number in range(CORRUPTIONS):
        data = bytearray(whole)
        kind = number % 4
        if kind == 0:  # any bit of it, the seal's too
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del data[draw.randrange(len(data)) :]
        elif kind == 2:
            data += draw.randbytes(draw.randint(1, 2 * SEAL_BYTES))
        else:
            start = draw.randrange(len(data))
            data[start : start + draw.randint(1, 64)] = draw.randbytes(draw.randint(0, 64))
        if data == whole:
            continue
        path.write_bytes(data)
        with pytest.raises(CorruptCheckpoint, match="cannot be read as a checkpoint"):
            load(path, SETTINGS)


@pytest.mark.parametrize("content", [b"", b"garbage", b"PK\x03\x04 cut short", b"x" * 200])
def test_load_foreign_file_raises_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(UserError) as error:
        load(tmp_path / "x.pt", SETTINGS)
    assert len(str(error.value).splitlines()) == 1
