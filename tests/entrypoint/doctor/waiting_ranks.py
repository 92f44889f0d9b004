"""Two ranks of a script that run while a test looks at them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, script
from tests.processes import wait_until

RUN = ("run", "--nproc-per-node=2", "--oversubscribe=1", "x.py")


@contextmanager
def started(entrypoint: Entrypoint, text: str, *words: str) -> Iterator[tuple[int, int]]:
    """Start a script as two ranks, and yield their process ids when both have noted them."""
    script(entrypoint.folder, "x.py", text)
    env = {**clean_environment(), "HOME": str(entrypoint.home), "LAUNCH_QUIET": "1", "LAUNCH_GRACE_PERIOD_S": "1"}
    command = [PYTHON, "-m", "entrypoint", *words]
    files = [entrypoint.folder / f"ready{rank}" for rank in range(2)]
    with subprocess.Popen(command, cwd=entrypoint.folder, env=env, stderr=subprocess.DEVNULL) as job:
        try:
            wait_until(lambda: all(file.exists() for file in files) or job.poll() is not None)
            assert job.poll() is None
            first, second = (int(file.read_text()) for file in files)
            yield first, second
        finally:
            job.terminate()
            job.wait(LAUNCH_LIMIT_S)
