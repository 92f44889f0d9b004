"""Checkpoints written during the training."""

from __future__ import annotations

import threading

import pytest
import torch

from train.checkpoint.tensor_files import AsyncCheckpointWriter


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
