"""Busy processes next to what is tested or measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# It ends with its parent, even where that is killed.
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


@contextmanager
def busy_processes(cpus: Sequence[int]) -> Iterator[None]:
    """Keep a busy process on each of these CPUs, two where it is named twice, each in its own session."""
    busy = [
        subprocess.Popen(["taskset", "-c", str(cpu), sys.executable, "-c", BUSY], start_new_session=True)
        for cpu in cpus
    ]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()
