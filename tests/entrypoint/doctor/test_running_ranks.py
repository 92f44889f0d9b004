"""Ranks seen from outside while they run: `entrypoint verify`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tests.processes import killed_at_end

pytestmark = pytest.mark.launch

# Each rank reports that it is ready, forks a helper as a loader would, and waits for the test to end it.
WAIT = """
    import os, subprocess, sys, time
    import torch
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    helper = subprocess.Popen(["sleep", "60"])
    open(f"ready{os.environ['RANK']}", "w").write(f"{os.getpid()} {helper.pid}")
    while not os.path.exists("stop"):
        time.sleep(0.05)
    helper.kill()
"""


@pytest.fixture
def two_ranks(entrypoint: Entrypoint) -> Iterator[list[int]]:
    """The process ids of two ranks that wait."""
    script(entrypoint.folder, "x.py", WAIT)
    env = {**clean_environment(), "HOME": str(entrypoint.home), "LAUNCH_QUIET": "1"}
    command = [PYTHON, "-m", "entrypoint", "run", "--nproc-per-node=2", "x.py"]
    with killed_at_end(command, cwd=entrypoint.folder, env=env) as job:
        ready = [entrypoint.folder / f"ready{rank}" for rank in range(2)]
        deadline = time.monotonic() + LAUNCH_LIMIT_S
        while not all(file.exists() and file.read_text() for file in ready):
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield [int(file.read_text().split()[0]) for file in ready]
        (entrypoint.folder / "stop").touch()
        assert job.wait(LAUNCH_LIMIT_S) == 0


@needs_two_cores
def test_verify_shows_each_rank(entrypoint: Entrypoint, two_ranks: list[int]) -> None:
    result = entrypoint("verify", *map(str, two_ranks))
    assert result.code == 0, result.out + result.err
    planned = entrypoint.plan("--nproc-per-node=2")["ranks"]
    for rank, (line, process) in enumerate(zip(result.out.splitlines(), two_ranks, strict=True)):
        assert line.startswith(f"rank {rank}  process {process}  CPUs {planned[rank]['cpus'][0]}  OpenMP lib")
    everything = {one["process"] for one in json.loads(entrypoint("verify", "--json").out)}
    helpers = {int((entrypoint.folder / f"ready{rank}").read_text().split()[1]) for rank in range(2)}
    assert everything >= set(two_ranks), "without ids, all ranks of the node"
    assert not everything & helpers, "what a rank starts is no rank"


@needs_two_cores
def test_verify_moved_rank_warns_and_exits_3(entrypoint: Entrypoint, two_ranks: list[int]) -> None:
    for thread in Path(f"/proc/{two_ranks[1]}/task").iterdir():
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(two_ranks[0]))
    result = entrypoint("verify", *map(str, two_ranks))
    assert result.code == 3
    (warning,) = (line for line in result.out.splitlines() if "warning" in line)
    assert warning.startswith("  warning: rank 1: runs on CPUs ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["1"], "process 1 is not a rank that the entrypoint started"),
        (["x"], "verify x: neither a run folder nor a process id"),
    ],
)
def test_verify_process_without_rank_raises(entrypoint: Entrypoint, arguments: list[str], said: str) -> None:
    result = entrypoint("verify", *arguments)
    assert result.code == 2
    assert said in result.err
