"""Writes checkpoints beside the training: one at a time, its failure told with the next one or at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class AsyncCheckpointWriter:
    """Runs what writes a checkpoint on a thread of its own, beside the steps that follow."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[object] | None = None

    def begin(self, write: Callable[[], object]) -> None:
        """Have a checkpoint written when the one before is; raises what that one met."""
        self.wait()
        self.pending = self.pool.submit(write)

    def wait(self) -> None:
        """Wait until it is written; raises what it met."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()


def snapshot(value: Any) -> Any:
    """Return a state with its tensors copied to the CPU, where no later step changes them."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: snapshot(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(one) for one in value)
    return value
