"""Processes that a rank forks: their signal handlers and CPUs, and the errors of lost ones."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children

from entrypoint.core.errors import ExitCode, UserError, first_line
from entrypoint.core.python_workarounds import exit_if_item_cannot_be_sent, silence_unfetched_items


@dataclass(frozen=True)
class WorkerPoolSpec:
    """The number of processes that decode for a rank or a node, and the CPUs that they may use."""

    cpus: frozenset[int]
    processes: int


def restore_default_signals() -> None:
    """Exit silently on SIGTERM, and ignore SIGINT, which the terminal sends to the rank too.

    Why: a forked worker inherits the trainer's handlers.
    A signal to the whole process group would then make it print a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def ignore_signals() -> None:
    """Ignore SIGTERM too, because the rank needs batches until the step at which all ranks save.

    A worker exits with its loader, or a few seconds after its rank, which it watches.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def init_worker(cpus: Iterable[int], *_: object, signals: Callable[[], None] = restore_default_signals) -> None:
    """Let a forked process run on all of these CPUs, and set its signal handlers.

    Why: if OpenMP threads are pinned one by one, so is the rank's main thread, and children inherit its single CPU.
    """
    signals()
    os.sched_setaffinity(0, cpus)


def init_loader_worker(cpus: Iterable[int], *_: object) -> None:
    """Initialize a loader worker, which exits if it cannot send a batch, such as one that /dev/shm has no room for.

    DataLoader reports the exit to the rank. Only one error still reaches sys.excepthook: the rank has exited without
    fetching a batch.
    """
    init_worker(cpus, signals=ignore_signals)
    silence_unfetched_items()
    exit_if_item_cannot_be_sent()


def end_workers() -> None:
    """Kill the loader workers of a failed rank: Python waits for them, and they ignore SIGTERM."""
    for worker in active_children():
        worker.kill()


@contextmanager
def translate_worker_death() -> Iterator[None]:
    """Convert the death of a loader worker into a `UserError`; DataLoader can raise it at any point.

    Python only prints an error inside a destructor. DataLoader raises this one again at the next batch.
    """
    print_unraisable = sys.unraisablehook
    sys.unraisablehook = lambda lost: None if is_worker_death(lost.exc_value) else print_unraisable(lost)
    try:
        yield
    except RuntimeError as error:
        if not is_worker_death(error):
            raise
        raise worker_lost_error(error) from None
    finally:
        sys.unraisablehook = print_unraisable


def is_worker_death(error: BaseException | None) -> bool:
    """Return whether DataLoader raised the error because a loader worker has ended."""
    return isinstance(error, RuntimeError) and "DataLoader worker" in str(error)


@contextmanager
def translate_worker_errors() -> Iterator[None]:
    """Convert errors when workers start, or send a batch, into a `UserError`.

    Their semaphores are in /dev/shm too.
    """
    try:
        yield
    except (OSError, EOFError) as error:
        raise worker_lost_error(error) from None


def worker_lost_error(error: BaseException) -> UserError:
    """Return the error of a rank that has lost a loader worker, or cannot start one.

    This also disables DataLoader's SIGCHLD handler, which would report the loss again while the rank exits.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while_sending = isinstance(error, ConnectionError | EOFError)
    cause = "a worker exited while it sent a batch" if while_sending else first_line(error).rstrip(". ")
    return UserError(
        f"loader workers: {cause}; see `df /dev/shm` and the memory limit, or lower TRAIN_NUM_WORKERS",
        ExitCode.RANK_FAILED,
    )
