"""What every process that a rank forks must undo of its parent: the signal handlers, and a pinned main thread."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from multiprocessing.queues import Queue
from typing import Any, NoReturn

from entrypoint.core.errors import ExitCode, UserError, first_line


@dataclass(frozen=True)
class WorkerPoolSpec:
    """Processes that decode for a rank or a node: so many, anywhere on these CPUs."""

    cpus: frozenset[int]
    processes: int


def restore_default_signals() -> None:
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


def init_worker(cpus: Iterable[int], *_: object, signals: Callable[[], None] = restore_default_signals) -> None:
    """Let a forked process run on all of these CPUs, and end quietly.

    Where OpenMP's threads are pinned one by one, the rank's main thread is too, and its children inherit its one CPU.
    """
    signals()
    os.sched_setaffinity(0, cpus)


def init_loader_worker(cpus: Iterable[int], *_: object) -> None:
    """Begin as a loader worker, which ends where it cannot hand a batch over.

    Python's queue drops what it cannot send, a batch for which /dev/shm has no room, and the rank would wait for ever.
    What is left to sys.excepthook here is a batch that its rank did not fetch, since it has ended (resource_sharer).
    """
    init_worker(cpus, signals=ignore_signals)
    sys.excepthook = no_traceback
    sending: Any = Queue
    sending._on_queue_feeder_error = staticmethod(end_at_once)


def no_traceback(*_: object) -> None:
    """Print nothing, because the rank reports the error."""


def end_at_once(*_: object) -> NoReturn:
    """Exit this process at once; DataLoader reports it to the rank."""
    os._exit(1)


def end_workers() -> None:
    """End the loader workers that a rank leaves when it fails: Python waits for them, and they ignore SIGTERM."""
    for worker in active_children():
        worker.kill()


@contextmanager
def translate_worker_death() -> Iterator[None]:
    """Convert the death of a loader worker into a `UserError`; DataLoader can raise it at any point."""
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        raise worker_lost_error(error) from None


@contextmanager
def translate_worker_errors() -> Iterator[None]:
    """Turn what keeps loader workers from being had, or from handing over, into a refusal.

    Their semaphores lie in /dev/shm too.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        raise worker_lost_error(error) from None


def worker_lost_error(error: BaseException) -> UserError:
    """Return the refusal of a rank that has lost a loader worker, or cannot have one.

    From here on DataLoader's handler is silent: it would tell of the loss a second time, during the rank's own end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handing = isinstance(error, ConnectionError | EOFError)
    cause = "one ended while it handed a batch over" if handing else first_line(error).rstrip(". ")
    return UserError(
        f"loader workers: {cause}; see `df /dev/shm` and the memory limit, or lower TRAIN_NUM_WORKERS",
        ExitCode.RANK_FAILED,
    )
