"""Ranks seen from outside while they run: `entrypoint verify`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Entrypoint, needs_two_cores
from tests.entrypoint.doctor.waiting_ranks import RUN, started

pytestmark = pytest.mark.launch

# Each rank starts a process as a loader would, which ends with it, and says that it is ready.
WAIT = """
    import os, subprocess, time
    import torch
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    helper = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    for name, process in (("helper", helper.pid), ("ready", os.getpid())):
        file = f"{name}{os.environ['RANK']}"
        open(file + ".new", "w").write(str(process))
        os.rename(file + ".new", file)
    time.sleep(600)
"""


@pytest.fixture
def two_ranks(entrypoint: Entrypoint) -> Iterator[tuple[int, int]]:
    """The process ids of two ranks that wait."""
    with started(entrypoint, WAIT, *RUN) as ranks:
        yield ranks


@needs_two_cores
def test_verify_shows_each_rank(entrypoint: Entrypoint, two_ranks: tuple[int, int]) -> None:
    result = entrypoint("verify", *map(str, two_ranks))
    assert result.code == 0, result.out + result.err
    planned = entrypoint.plan("--nproc-per-node=2")["ranks"]
    for rank, (line, process) in enumerate(zip(result.out.splitlines(), two_ranks, strict=True)):
        assert line.startswith(f"rank {rank}  process {process}  CPUs {planned[rank]['cpus'][0]}  OpenMP lib")
    everything = {one["process"] for one in json.loads(entrypoint("verify", "--json").out)}
    helpers = {int((entrypoint.folder / f"helper{rank}").read_text()) for rank in range(2)}
    assert everything >= set(two_ranks), "without ids, all ranks of the node"
    assert not everything & helpers, "what a rank starts is no rank"


@needs_two_cores
def test_verify_moved_rank_warns_and_exits_3(entrypoint: Entrypoint, two_ranks: tuple[int, int]) -> None:
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
