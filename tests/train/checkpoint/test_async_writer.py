"""Checkpoints written during the training."""

from __future__ import annotations

import threading

import pytest
import torch

from train.checkpoint.async_writer import AsyncCheckpointWriter, snapshot


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


def test_snapshot_is_an_independent_copy() -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    state = {"a": weights, "b": [weights, 1.5, {"c": (weights, None)}], "d": "text"}
    taken = snapshot(state)
    weights += 1
    first = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(taken["a"], first)
    assert torch.equal(taken["b"][0], first)
    assert torch.equal(taken["b"][2]["c"][0], first)
    assert (taken["b"][1], taken["b"][2]["c"][1], taken["d"]) == (1.5, None, "text")
