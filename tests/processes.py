"""What processes do, seen from outside."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LAUNCH_LIMIT_S

REPLACE_LOADAVG = 'echo "9.00 9.00 9.00 $1/80 4711" >"$0" && mount --bind "$0" /proc/loadavg && shift && exec "$@"'


@contextmanager
def killed_at_end(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """Start a process, with the options of `subprocess.Popen`, and kill it at the end if it still runs.

    `Popen` as a context waits for the process: a check that fails would never be reported while it is stopped.
    """
    with subprocess.Popen(words, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def next_line(process: subprocess.Popen[Any]) -> Any:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def state(pid: int) -> str:
    """Return a process's state by the letter that ps(1) shows, nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def has_ended(pid: int) -> bool:
    """Tell whether a process is gone, or waits for its parent to hear of its end."""
    return state(pid) in ("", "Z")


def wait_until(true: Callable[[], bool]) -> None:
    """Wait until this is true, LAUNCH_LIMIT_S seconds at most."""
    until = time.monotonic() + LAUNCH_LIMIT_S
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started and not yet heard the end of, by whichever of its threads."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(one) for task in tasks for one in task.read_text().split())


def process_tree(pid: int) -> list[int]:
    """Return a process and all that descend from it."""
    return [pid, *(descendant for child in children(pid) for descendant in process_tree(child))]


def own_memory_mib(pid: int) -> float:
    """Return the memory of a process and its descendants besides pages of files, a shared page counted once.

    Files, such as libraries, are left out: other processes share them too, and how many there are changes.
    """
    texts = [Path(f"/proc/{one}/smaps_rollup").read_text() for one in process_tree(pid)]
    return sum(int(found) for text in texts for found in re.findall(r"^Pss_(?:Anon|Shmem): +(\d+)", text, re.M)) / 1024


def with_high_load(folder: Path, running: int = 2) -> tuple[str, ...]:
    """Return words that start a command which reads a load average of 9 in /proc/loadavg.

    So many processes run or wait, this one among them. Skips the test where /proc/loadavg cannot be replaced.
    """
    words = ("unshare", "--mount", "sh", "-c", REPLACE_LOADAVG, str(folder / "loadavg"), str(running))
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare(1) and the right to mount over /proc/loadavg")
    return words
