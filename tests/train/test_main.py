"""The trainer as a program: what a signal ends is reported as that, whatever it interrupted."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable

import pytest
import torch

from entrypoint.core.errors import ExitCode
from train.__main__ import find_stop_signal, out_of_memory_error
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


def allocation_error() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    ("make", "is_one_line"),
    [
        (allocation_error, True),
        (lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nSee"), True),
        (MemoryError, True),
        (lambda: RuntimeError("shapes differ"), False),
    ],
)
def test_memory_that_cannot_be_had_is_one_line(
    make: Callable[[], RuntimeError | MemoryError], is_one_line: bool
) -> None:
    error = out_of_memory_error(make())
    assert (error is not None) is is_one_line
    if error:
        assert error.code == ExitCode.RANK_FAILED
        assert str(error).isprintable()
        assert str(error).startswith("out of memory (")
