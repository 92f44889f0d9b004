"""The trainer as a program: what a signal ends is reported as that, whatever it interrupted."""

from __future__ import annotations

import io
import signal

import pytest
import torch

from train.__main__ import find_stop_signal
from train.preemption import StopSignal


class Interrupted(io.RawIOBase):
    """A file whose writing runs into a signal, as CPython's buffered writer does between two blocks."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks

    def writable(self) -> bool:
        return True

    def write(self, block: memoryview) -> int:  # type: ignore[override]
        self.blocks -= 1
        if self.blocks < 0:
            raise StopSignal(signal.SIGINT)
        return len(block)


def test_find_stop_signal_finds_wrapped_signal() -> None:
    seen = set()
    for blocks in range(12):
        with pytest.raises((StopSignal, RuntimeError)) as caught:
            torch.save({"w": torch.ones(100_000)}, Interrupted(blocks))
        found = find_stop_signal(caught.value)
        assert found is not None
        assert found.number == signal.SIGINT
        seen.add(type(caught.value))
    assert seen == {StopSignal, RuntimeError}


def test_find_stop_signal_other_error_is_none() -> None:
    assert find_stop_signal(ValueError("of its own")) is None
