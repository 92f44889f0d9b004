"""The witness of a single rank: says why the kernel killed it, and is otherwise not noticed."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PYTHON, Entrypoint, clean_environment, script

HOG = """
    import os
    kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
"""
LOOKS = """
    import os, sys
    try:
        os.wait()
    except ChildProcessError:
        print("no child")
    sys.stdout.flush()
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.launch
def test_it_says_that_the_kernel_killed_a_single_rank(entrypoint: Entrypoint, limited: tuple[str, ...]) -> None:
    hog = script(entrypoint.folder, "hog.py", HOG)
    result = entrypoint(
        command=(*limited, PYTHON, "-m", "entrypoint", "run", str(hog)),
        env={"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"},
    )
    assert result.code == -signal.SIGKILL, result.err
    assert result.error_lines == [
        "entrypoint: error: the kernel killed a process as the rank ended: out of memory, the 1.5 GiB that this job may"
        " use (peak 1.5 GiB); lower TRAIN_BATCH_SIZE or TRAIN_WORKERS, set TRAIN_FEED=stream, or ask for more"
    ]


@pytest.mark.launch
@pytest.mark.parametrize("end", [0, signal.SIGTERM, signal.SIGKILL])
def test_it_is_no_child_of_the_rank_and_says_nothing_of_another_end(entrypoint: Entrypoint, end: int) -> None:
    looks = script(entrypoint.folder, "looks.py", LOOKS)
    result = entrypoint("run", looks, str(end), env={"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"})
    assert result.code == -end
    assert result.out.splitlines() == ["no child"]
    assert result.err == ""


@pytest.mark.launch
def test_it_holds_no_file_but_where_it_would_speak(entrypoint: Entrypoint, tmp_path: Path) -> None:
    said = script(entrypoint.folder, "closes.py", "import os\nos.close(1)\nos.read(0, 1)\n")
    command = [PYTHON, "-m", "entrypoint", "run", str(said)]
    environ = {**clean_environment(), "LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""  # comes back only when nobody can write any more
        assert process.poll() is None
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
