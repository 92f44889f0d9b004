"""Threads that decode: where they run, which signals they get, and how they end."""

from __future__ import annotations

import os
import signal
from queue import SimpleQueue
from threading import Thread, get_native_id

from train.data.workers import WorkerThreads, init_worker

CPUS = frozenset(os.sched_getaffinity(0))


def test_init_worker_undoes_pinning_and_blocks_signals() -> None:
    seen: list[object] = []

    def work() -> None:
        os.sched_setaffinity(0, {min(CPUS)})
        init_worker(CPUS)
        seen.extend((os.sched_getaffinity(0), signal.pthread_sigmask(signal.SIG_BLOCK, ())))

    thread = Thread(target=work)
    thread.start()
    thread.join()
    cpus, blocked = seen
    assert cpus == CPUS
    assert isinstance(blocked, set)
    assert {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1} <= blocked
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_worker_threads_grow_and_stop_after_waiting_tasks() -> None:
    threads = WorkerThreads(CPUS)
    threads.grow(1)
    threads.grow(3)
    threads.grow(2)
    assert len(threads) == 3
    done: SimpleQueue[int] = SimpleQueue()
    for _ in range(20):
        threads.tasks.put(lambda: done.put(get_native_id()))
    own = list(threads.threads)
    threads.stop()
    assert done.qsize() == 20
    assert not any(thread.is_alive() for thread in own)
    assert len(threads) == 0
