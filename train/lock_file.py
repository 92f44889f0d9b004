"""Exclusive locks on folders: of a run, by a file with flock(2) and a heartbeat, and of a cache, by flock(2).

Stale lock files of crashed runs are removed. flock(2) says whether a holder under the same kernel is alive. The holder
also touches the file every few seconds, for other nodes, and for file systems without locks (NFS, Lustre). Their clocks
may differ, because only changes of the modification time count.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from entrypoint.core.console import log
from entrypoint.core.errors import UserError, printable
from entrypoint.core.network import LOG_INTERVAL_S
from entrypoint.core.paths import open_regular, read_regular
from entrypoint.machine.procfs import read_lines

LOCK_NAME = ".lock"
HEARTBEAT_S = 2.0
# A lock that was not touched for this long is stale.
STALE_S = 20.0
PAUSE_S = 0.2


class RunLock:
    """A lock file in a folder, held from `acquire` to the end of the block.

    `is_held` returns whether no other process has taken it since.
    """

    def __init__(self, *, beat_s: float = HEARTBEAT_S, stale_s: float = STALE_S, name: str = LOCK_NAME) -> None:
        self.beat_s, self.stale_s, self.name = beat_s, stale_s, name
        self.path: Path | None = None
        self.file = -1
        self.identity = {"node": socket.gethostname(), "pid": os.getpid(), "token": os.urandom(8).hex()}
        self.over = threading.Event()

    def __enter__(self) -> Self:  # noqa: D105
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the lock."""
        self.over.set()
        if self.path and self.is_held:
            with suppress(OSError):
                self.path.unlink()
        if self.file >= 0:
            os.close(self.file)

    def acquire(self, folder: Path) -> None:
        """Lock a folder, also if the lock is stale; raises `UserError` if its holder is alive, `OSError`."""
        if holder := self.try_acquire(folder):
            raise UserError(
                f"{folder}: {holder} is training in this folder. Set another TRAIN_RUN_NAME or stop that process."
            )

    def try_acquire(self, folder: Path) -> str:
        """Lock a folder, also if the lock is stale; return the holder if it is alive, else an empty text."""
        path = folder / self.name
        while True:
            try:
                self.file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                if holder := live_holder(path, self.stale_s, log):
                    return holder
                remove_stale_lock(path)
                continue
            break
        # It waits for a process that only asks whether the file is locked.
        has_flock = not wait_for(lambda: try_flock(self.file), f"the lock of {folder}")
        os.write(self.file, json.dumps(self.identity | {"boot": boot_id() if has_flock else ""}).encode())
        self.path = path
        threading.Thread(target=self.heartbeat, daemon=True).start()
        return ""

    @property
    def is_held(self) -> bool:
        """Return whether this process still holds the lock."""
        return self.path is not None and self.identity.items() <= read_holder(self.path).items()

    def heartbeat(self) -> None:
        """Touch the lock file until the lock is released."""
        assert self.path is not None
        while not self.over.wait(self.beat_s):
            with suppress(OSError):
                os.utime(self.path)


def boot_id() -> str:
    """Return what distinguishes this boot of this machine from all others, in each of its containers."""
    return "".join(read_lines(Path("/proc/sys/kernel/random/boot_id")))


def read_holder(path: Path) -> dict[str, object]:
    """Return the holder of a lock, empty if the file cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(path))
        return dict(found) if isinstance(found, dict) else {}
    return {}


def live_holder(path: Path, stale_s: float, tell: Callable[[str], None]) -> str:
    """Return who holds a lock, empty if that process is gone.

    A holder under this kernel has locked the file. One elsewhere is alive if it touches the file within `stale_s`
    seconds.
    """
    holder = read_holder(path)
    who = f"process {printable(holder.get('pid', '?'))} on {printable(holder.get('node', '?'))}"
    if holder.get("boot") == boot_id() != "":
        alive = is_locked(path)
    else:
        tell(f"{path.parent} is locked by {who}; waiting {stale_s:.0f} s for a sign that it is alive")
        alive = wait_for_heartbeat(path, stale_s)
    return who if alive else ""


def is_locked(path: Path) -> bool:
    """Return whether another process has locked a file by flock(2)."""
    try:
        file = open_regular(path)
    except OSError:  # it was released
        return False
    try:
        return try_flock(file) == "busy"
    finally:
        os.close(file)


def remove_stale_lock(path: Path) -> None:
    """Remove a lock whose holder is gone; of two processes that find it, one moves it.

    Raises OSError if nobody can move it.
    """
    temp_dir = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        path.rename(temp_dir)
        with suppress(OSError):  # it may be a folder
            temp_dir.unlink()


@contextmanager
def folder_lock(path: Path, description: str) -> Iterator[None]:
    """Hold the lock file `path`, and wait for it; `description` names its holder in the log.

    flock(2) locks it where the file system has that. Lustre without `-o flock` and NFS without a lock daemon do not,
    and answer ENOSYS, ENOLCK or EOPNOTSUPP: there a file with a heartbeat is the lock. Raises `OSError` if the file
    cannot be made.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if wait_for(lambda: try_flock(file), description) == "no flock":
            with RunLock(name=f"{path.name}.held") as lock:
                wait_for(lambda: "busy" if lock.try_acquire(path.parent) else "", description)
                yield
        else:
            yield
    finally:
        os.close(file)


def try_flock(file: int) -> str:
    """Try to lock an open file; return `busy` if another process has it, `no flock` if locks do not work here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError:
        return "no flock"
    return ""


def wait_for(attempt: Callable[[], str], description: str) -> str:
    """Repeat an attempt until it returns something other than `busy`, and return that; log every 10 s."""
    last_log = time.monotonic()
    while (state := attempt()) == "busy":
        if time.monotonic() - last_log >= LOG_INTERVAL_S:
            last_log = time.monotonic()
            log(f"waiting for {description}")
        time.sleep(PAUSE_S)
    return state


def wait_for_heartbeat(path: Path, within_s: float) -> bool:
    """Wait until a file is touched or removed, at most `within_s` seconds; return whether it was touched."""
    first, began = mtime_ns(path), time.monotonic()
    while time.monotonic() - began < within_s:
        now = mtime_ns(path)
        if now != first:
            return now is not None
        time.sleep(PAUSE_S)
    return False


def mtime_ns(path: Path) -> int | None:
    """Return a file's modification time, or None if there is no file."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
