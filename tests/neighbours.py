"""Busy processes beside what is tested or measured."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

LOADED = 'echo "9.00 9.00 9.00 $1/80 4711" >"$0" && mount --bind "$0" /proc/loadavg && shift && exec "$@"'


@contextmanager
def neighbours(cpus: Sequence[int]) -> Iterator[None]:
    """Keep a busy process on each of these CPUs, two where it is named twice, each in its own session."""
    busy = [
        subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", "while True: pass"], start_new_session=True)
        for cpu in cpus
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def loaded(folder: Path, running: int = 2) -> tuple[str, ...]:
    """Return words that start a command where the last minute's load is that of a machine with neighbours for long.

    So many run or wait, this process among them. Skips the test where that cannot be shown.
    """
    words = ("unshare", "--mount", "sh", "-c", LOADED, str(folder / "loadavg"), str(running))
    if not shutil.which("unshare") or subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare(1) and the right to mount over /proc/loadavg")
    return words
