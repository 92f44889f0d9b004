"""End a rank whose collectives have no time limit of their own, if another rank stops answering."""

from __future__ import annotations

import os
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, PeerLostError, first_line

# oneCCL's and MPI's collectives wait for ever for a rank that is stopped or gone.
UNTIMED_BACKENDS = ("ccl", "mpi")
INTERVAL_S = 2.0
# How long a rank waits at its end for the others to notice.
STOP_LIMIT_S = 3.0


class PeerWatch:
    """A thread of each rank that meets the others every two seconds, over a Gloo group of its own.

    If that fails, because a rank is stopped or gone, the thread reports it and ends the process with code 5. The main
    thread may wait in a collective for ever. The first rank that stops its watch ends those of all others.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.stopped = threading.Event()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Tell the other ranks that this one is about to end, so that none takes it for lost."""
        self.stopped.set()
        self.thread.join(INTERVAL_S + STOP_LIMIT_S)

    def run(self) -> None:
        """Meet the others until one of them stops; end this process if that fails."""
        ends = torch.zeros(1, dtype=torch.int32)
        while not int(ends.item()):
            self.stopped.wait(INTERVAL_S)
            ends.fill_(int(self.stopped.is_set()))
            try:
                dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
            except RuntimeError as error:
                if not self.stopped.is_set():
                    self.end_process(error)
                return

    def end_process(self, error: RuntimeError) -> None:
        """Report the lost rank, and end this process without Python's own end."""
        message = f"rank {self.rank}: another rank does not answer, or has ended ({first_line(error)})"
        report_error(PeerLostError(message, {"called": "a collective", "how": "timeout"}))
        os._exit(ExitCode.RANK_FAILED)
