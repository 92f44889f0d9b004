"""What every process that a rank forks must undo of its parent: the signal handlers, and a pinned main thread."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Crew:
    """Processes that decode for a rank or a node: so many, anywhere on these CPUs."""

    cpus: frozenset[int]
    processes: int


def default_signals() -> None:
    """End quietly on SIGTERM, and leave SIGINT to the rank, which the terminal sends it too.

    A forked worker inherits the trainer's handlers, and would answer the signal that ends its whole process group
    with a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_signals() -> None:
    """Leave SIGTERM to the rank as well: it still wants batches until the step at which all ranks save.

    A worker ends with its loader, or a few seconds after its rank, which it watches.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def begin_work(cpus: Iterable[int], *_: object, signals: Callable[[], None] = default_signals) -> None:
    """Let a forked process run on all of these CPUs, and end quietly.

    Where OpenMP's threads are pinned one by one, the rank's main thread is too, and its children inherit its one CPU.
    """
    signals()
    os.sched_setaffinity(0, cpus)
