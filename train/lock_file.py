"""Exclusive locks on folders: of a run, by a file with a heartbeat, and of a cache, by flock(2) where that works.

Stale lock files of crashed runs are removed. The holder touches the lock file every few seconds. This also works on
file systems without locks (NFS, Lustre), and on nodes whose clocks differ, because only changes of the modification
time count.
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
from entrypoint.core.paths import read_regular

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
        self.over = threading.Event()

    def __enter__(self) -> Self:  # noqa: D105
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Release the lock."""
        self.over.set()
        if self.path and self.is_held:
            with suppress(OSError):
                self.path.unlink()

    def acquire(self, folder: Path) -> None:
        """Lock a folder, also if the lock is stale; raises `UserError` if its holder is alive, `OSError`."""
        if holder := self.try_acquire(folder):
            raise UserError(
                f"{folder}: {holder} is training in this folder. Set another TRAIN_RUN_NAME or stop that process."
            )

    def try_acquire(self, folder: Path) -> str:
        """Lock a folder, also if the lock is stale; return the holder if it is alive, else an empty text."""
        path = folder / self.name
        text = json.dumps(identity())
        while True:
            try:
                file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            except FileExistsError:
                if holder := live_holder(path, self.stale_s, log):
                    return holder
                remove_stale_lock(path)
                continue
            os.write(file, text.encode())
            os.close(file)
            break
        self.path = path
        threading.Thread(target=self.heartbeat, daemon=True).start()
        return ""

    @property
    def is_held(self) -> bool:
        """Return whether this process still holds the lock."""
        return self.path is not None and read_holder(self.path) == identity()

    def heartbeat(self) -> None:
        """Touch the lock file until the lock is released."""
        assert self.path is not None
        while not self.over.wait(self.beat_s):
            with suppress(OSError):
                os.utime(self.path)


def identity() -> dict[str, object]:
    """Return values that identify this process across nodes and containers."""
    return {"node": socket.gethostname(), "pid": os.getpid(), "pids": pid_namespace(), "born": start_time(os.getpid())}


def pid_namespace() -> str:
    """Return an identifier of this boot and container, in which process ids are unique."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def start_time(pid: int) -> str:
    """Return a process's start time in clock ticks, or an empty text if it does not exist or is a zombie."""
    with suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] == "Z" else fields[19]
    return ""


def read_holder(path: Path) -> dict[str, object]:
    """Return the holder of a lock, empty if the file cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_regular(path))
        return dict(found) if isinstance(found, dict) else {}
    return {}


def live_holder(path: Path, stale_s: float, tell: Callable[[str], None]) -> str:
    """Return who holds a lock, empty if that process is gone.

    A holder on the same machine is looked up by its process id. A holder elsewhere is alive if it touches the file
    within `stale_s` seconds, and so is one whose process id or start time cannot be read.
    """
    found = read_holder(path)
    pid, born = found.get("pid"), found.get("born")
    who = f"process {printable(found.get('pid', '?'))} on {printable(found.get('node', '?'))}"
    if found.get("pids") == pid_namespace() != "" and isinstance(pid, int) and isinstance(born, str):
        alive = start_time(pid) == born != ""
    else:
        tell(f"{path.parent} is locked by {who}; waiting {stale_s:.0f} s for a sign that it is alive")
        alive = wait_for_heartbeat(path, stale_s)
    return who if alive else ""


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
