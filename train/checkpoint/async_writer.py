"""Write checkpoints in the background, one at a time; an error surfaces at the next checkpoint or at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor


class AsyncCheckpointWriter:
    """Write checkpoints on a background thread while training continues."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[object] | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Wait for the previous checkpoint, then start writing this one; raises the previous one's error."""
        self.wait()
        self.pending = self.pool.submit(write)

    def wait(self) -> None:
        """Wait until the pending checkpoint is written; raises its error."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()


def snapshot(value: Any) -> Any:
    """Return a copy of a state on the CPU, which later steps do not change."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: snapshot(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(snapshot(one) for one in value)
    return value
