"""Threads that read and decode images while a rank trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread


@dataclass(frozen=True)
class WorkerSpec:
    """The number of threads that decode for a rank or a node, and the CPUs that they may use."""

    cpus: frozenset[int]
    count: int


def init_worker(cpus: Iterable[int]) -> None:
    """Let the calling thread run on all of these CPUs, and leave all signals to the main thread.

    Why: if OpenMP threads are pinned one by one, so is the rank's main thread, and its threads inherit its single CPU.
    A main thread that waits for a batch does not wake up for a signal that another thread got.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.sched_setaffinity(0, cpus)


class WorkerThreads:
    """Threads that run tasks in order; a task handles its own errors."""

    def __init__(self, cpus: frozenset[int]) -> None:
        self.cpus = cpus
        self.tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self.threads: list[Thread] = []

    def __len__(self) -> int:
        """Return the number of threads."""
        return len(self.threads)

    def grow(self, count: int) -> None:
        """Start threads until there are so many."""
        while len(self.threads) < count:
            # A daemon, because a thread that waits for a file system must not keep a failed rank.
            thread = Thread(target=self.work, name=f"loader-{len(self.threads)}", daemon=True)
            thread.start()
            self.threads.append(thread)

    def work(self) -> None:
        """Run tasks until None comes."""
        init_worker(self.cpus)
        while task := self.tasks.get():
            task()

    def stop(self) -> None:
        """End all threads after the tasks that are waiting."""
        for _ in self.threads:
            self.tasks.put(None)
        for thread in self.threads:
            thread.join()
        self.threads.clear()
