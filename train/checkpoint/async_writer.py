"""Write checkpoints in the background, one at a time; an error surfaces at the next checkpoint or at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor


class AsyncCheckpointWriter:
    """Write checkpoints on a background thread while training continues.

    All checkpoints are copied into the same memory. Why: memory that is taken and freed for each one leaves holes in
    the heap. The training fills a part of them, the next copy does not fit, and the process grows.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[object] | None = None
        self.buffers: dict[str, dict[str, Tensor]] = {}

    def snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return contiguous copies of each section's tensors on the CPU, which the next call overwrites.

        Waits for the previous checkpoint; raises its error.
        """
        self.wait()
        before, self.buffers = self.buffers, {}
        for section, named in tensors.items():
            old = before.get(section, {})
            self.buffers[section] = {name: copy_into(old.get(name), one.detach()) for name, one in named.items()}
        return self.buffers

    def submit(self, write: Callable[[], object]) -> None:
        """Wait for the previous checkpoint, then start writing this one; raises the previous one's error."""
        self.wait()
        self.pending = self.pool.submit(write)

    def wait(self) -> None:
        """Wait until the pending checkpoint is written; raises its error."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()


def copy_into(buffer: Tensor | None, value: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, in the buffer if it has this shape and type."""
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        buffer = torch.empty(value.shape, dtype=value.dtype)
    return buffer.copy_(value)
