"""Exclusive locks: of a run's folder by a lease, and of a cache by flock(2); filelock has both.

The holder of a lease touches its file every few seconds, for other nodes, and for file systems without locks (NFS,
Lustre). Their clocks may differ, because only changes of the modification time count.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from entrypoint.core.console import log, log_once
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import exists, is_file
from entrypoint.core.network import LOG_INTERVAL_S

try:
    from filelock import BaseFileLock, FileLock, SoftFileLease, SoftFileLock, Timeout
except ImportError:  # next to the user's own torch it may be any
    why = "filelock: is missing or older than 4.3. Run: pip install 'reference-training[train]'"
    raise UserError(why, ExitCode.MACHINE) from None

LOCK_NAME = ".lock"
HEARTBEAT_S = 2.0
# A lease that was not touched for this long is stale.
STALE_S = 20.0
PAUSE_S = 0.2


class RunLock:
    """A lock file in a folder, held from `acquire` to the end of the block.

    `is_held` returns whether no other process has taken it since.
    """

    def __init__(self, stale_s: float = STALE_S) -> None:
        self.stale_s = stale_s
        self.folder: Path | None = None
        self.lease: SoftFileLease | None = None

    def __enter__(self) -> Self:  # noqa: D105
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the lock."""
        if self.lease:
            with suppress(OSError):
                self.lease.release()

    def acquire(self, folder: Path) -> None:
        """Lock a folder, also if the lock is stale; raises `UserError` if its holder is alive, and OSError.

        A holder in this PID namespace that has gone is known at once; another one is waited for.
        """
        path = folder / LOCK_NAME
        if exists(path) and not is_file(path):
            path.rename(path.with_name(f"{LOCK_NAME}.{os.getpid()}"))
        lease = SoftFileLease(path, lease_duration=STALE_S, heartbeat_interval=HEARTBEAT_S)
        first, began = mtime_ns(path), time.monotonic()
        while not try_acquire(lease, 0):
            holder = lease.owner
            who = f"process {holder.pid} on {printable(holder.hostname)}" if holder else "another process"
            log_once(f"{folder} is locked by {who}; waiting {self.stale_s:.0f} s for a sign that it is alive")
            time.sleep(PAUSE_S)
            if mtime_ns(path) != first:  # it is alive, or has just ended, and left a run there
                raise UserError(
                    f"{folder}: {who} is training in this folder. Set another TRAIN_RUN_NAME or stop that process."
                )
            if time.monotonic() - began > self.stale_s:
                lease.force_break()
        self.folder, self.lease = folder, lease

    def upload(self) -> None:
        """Upload nothing: see `StoredRunLock`."""

    def finish_upload(self, folder: Path, until: float) -> str | None:  # noqa: ARG002
        """Return where a run's folder is for its user."""
        return str(folder)

    @property
    def is_held(self) -> bool:
        """Return whether this process still holds the lock."""
        return self.lease is not None and getattr(self.lease.owner, "token", "") == self.lease.token


@contextmanager
def folder_lock(path: Path, description: str) -> Iterator[None]:
    """Hold the lock file `path`, and wait for it; `description` names its holder in the log.

    flock(2) locks it where the file system has that. Lustre without `-o flock` and NFS without a lock daemon do not:
    there a file that names its holder is the lock. Raises `OSError` if the file cannot be made.
    """
    lock: BaseFileLock = FileLock(path, fallback_to_soft=False)
    try:
        is_free = try_acquire(lock, LOG_INTERVAL_S)
    except OSError:  # no such locks, or no file can be made, which this one says too
        lock = SoftFileLock(path.with_name(f"{path.name}.held"))
        is_free = try_acquire(lock, LOG_INTERVAL_S)
    while not is_free:
        log(f"waiting for {description}")
        is_free = try_acquire(lock, LOG_INTERVAL_S)
    try:
        yield
    finally:
        lock.release()


def try_acquire(lock: BaseFileLock, limit_s: float) -> bool:
    """Wait for a lock, at most `limit_s` seconds; return whether it is held now. Raises OSError."""
    try:
        lock.acquire(timeout=limit_s)
    except Timeout:
        return False
    return True


def mtime_ns(path: Path) -> int | None:
    """Return a file's modification time, or None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
