"""Saving is atomic, by the writer in the background too: a checkpoint is complete or not there."""

from __future__ import annotations

import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from tests.train.checkpoint.saved import DATA, SETTINGS, checkpoint, model_of, save
from train.checkpoint.metadata import MODEL, Normalization, ScalerState
from train.checkpoint.tensor_files import AsyncCheckpointWriter, Checkpoint, CheckpointReader, save_checkpoint


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    more = {
        "losses": (0.1, 1e-30, 3.0), "best": 12.25, "plan": {"version": 2}, "examples": 192,
        "scaler": ScalerState(scale=65536.0, growth_tracker=3),
        "normalization": Normalization(mean=(0.1,), scale=(float(torch.tensor(1 / 3)),)),
    }  # fmt: skip
    wanted = checkpoint(13, **more)
    reader = CheckpointReader(save_checkpoint(tmp_path / "checkpoint", wanted, (1, 1)))
    found = reader.metadata
    assert {name: getattr(found, name) for name in more} == more
    assert (found.epoch, found.step, found.seconds, found.settings, found.data) == (1, 13, 2.5, SETTINGS, DATA)
    whole = reader.whole()
    assert set(whole) == set(wanted.tensors)
    for section, tensors in wanted.tensors.items():
        assert set(whole[section]) == set(tensors)
        assert all(torch.equal(whole[section][name], one) for name, one in tensors.items())


def test_checkpoint_can_be_verified_by_sha256sum(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint", 7)
    result = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=path, capture_output=True, text=True, check=True)
    assert result.stdout.count(": OK") == 4


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_memory_format_does_not_change_values(tmp_path: Path, layout: torch.memory_format) -> None:
    value = torch.randn(2, 3, 4, 5).to(memory_format=layout)
    made = Checkpoint(checkpoint(1).metadata, {MODEL: {"w": value}})
    path = save_checkpoint(tmp_path, made, (1, 1))
    assert torch.equal(CheckpointReader(path).whole()[MODEL]["w"], value)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 7, best=True, seconds=1.0)
    path = save(tmp_path, 7, seconds=2.0)
    assert CheckpointReader(path).metadata.seconds == 2.0
    assert sorted(one.name for one in tmp_path.iterdir()) == ["best", path.name]


def test_full_disk_raises_os_error_and_keeps_old_checkpoint(tmp_path: Path) -> None:
    before = save(tmp_path / "checkpoint", 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            save(tmp_path / "checkpoint", 2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "checkpoint").iterdir()) == [before]
    assert model_of(before)["w"][0, 0] == 1


def test_submit_writes_one_checkpoint_at_a_time() -> None:
    saver, gate, done = AsyncCheckpointWriter(), threading.Event(), list[int]()

    def write(number: int) -> None:
        gate.wait(10)
        done.append(number)

    saver.submit(lambda: write(1))
    assert not done
    gate.set()
    saver.submit(lambda: write(2))
    assert done[0] == 1
    saver.wait()
    assert done == [1, 2]
    saver.wait()


@pytest.mark.parametrize("next_call", ["wait", "begin"])
def test_async_writer_raises_failure_once_at_next_call(next_call: str) -> None:
    saver, after = AsyncCheckpointWriter(), list[int]()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    saver.submit(fail)
    with pytest.raises(OSError, match="No space left"):
        saver.wait() if next_call == "wait" else saver.submit(lambda: after.append(1))
    saver.wait()
    assert not after


def test_snapshot_is_an_independent_contiguous_copy() -> None:
    weights, step = torch.arange(6.0).reshape(2, 3), torch.tensor(1)
    taken = AsyncCheckpointWriter().snapshot({"model": {"w": weights.T}, "optimizer": {"step": step}, "ema": {}})
    weights += 1
    step += 1
    assert torch.equal(taken["model"]["w"], torch.arange(6.0).reshape(2, 3).T)
    assert taken["model"]["w"].is_contiguous()
    assert taken["optimizer"]["step"] == 1
    assert taken["ema"] == {}


@pytest.mark.parametrize(
    ("later", "reuses"),
    [
        (torch.full((2, 3), 7.0), True),
        (torch.full((2, 2), 7.0), False),  # a pruned model
        (torch.full((2, 3), 7), False),
    ],
)
def test_later_snapshot_uses_the_same_memory_for_equal_tensors(later: torch.Tensor, reuses: bool) -> None:
    saver = AsyncCheckpointWriter()
    first = saver.snapshot({"model": {"w": torch.zeros(2, 3), "gone": torch.zeros(1)}})["model"]["w"]
    second = saver.snapshot({"model": {"w": later}})["model"]
    assert list(second) == ["w"]
    assert torch.equal(second["w"], later)
    assert (second["w"].data_ptr() == first.data_ptr()) is reuses


def test_snapshot_waits_for_the_checkpoint_that_is_written() -> None:
    saver, gate, seen = AsyncCheckpointWriter(), threading.Event(), list[float]()
    taken = saver.snapshot({"model": {"w": torch.zeros(1)}})

    def write() -> None:
        gate.wait(10)
        seen.append(float(taken["model"]["w"]))

    saver.submit(write)
    threading.Timer(0.1, gate.set).start()
    saver.snapshot({"model": {"w": torch.ones(1)}})
    assert seen == [0.0]
