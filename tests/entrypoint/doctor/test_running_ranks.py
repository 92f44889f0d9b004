"""Ranks seen from outside while they run, odd ones too: `entrypoint verify`."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.doctor.running_ranks import describe, find_ranks, stacks_of_ranks, verify_running
from entrypoint.plan.model import PLAN_VAR, RankPlan
from tests.conftest import Entrypoint, needs_two_cores, refusal
from tests.entrypoint.doctor.waiting_ranks import RUN, started
from tests.factories import make_machine, make_test_plan
from tests.processes import killed_at_end, wait_until

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


@pytest.mark.launch
@needs_two_cores
def test_verify_shows_each_rank(entrypoint: Entrypoint, two_ranks: tuple[int, int]) -> None:
    result = entrypoint.succeed("verify", *map(str, two_ranks))
    planned = entrypoint.plan("--nproc-per-node=2")["ranks"]
    for rank, (line, process) in enumerate(zip(result.out.splitlines(), two_ranks, strict=True)):
        assert line.startswith(f"rank {rank}  process {process}  CPUs {planned[rank]['cpus'][0]}  OpenMP lib")
    everything = {one["process"] for one in json.loads(entrypoint("verify", "--json").out)}
    helpers = {int((entrypoint.folder / f"helper{rank}").read_text()) for rank in range(2)}
    assert everything >= set(two_ranks), "without ids, all ranks of the node"
    assert not everything & helpers, "what a rank starts is no rank"


@pytest.mark.launch
@needs_two_cores
def test_verify_moved_rank_warns_and_exits_3(entrypoint: Entrypoint, two_ranks: tuple[int, int]) -> None:
    for thread in Path(f"/proc/{two_ranks[1]}/task").iterdir():
        os.sched_setaffinity(int(thread.name), os.sched_getaffinity(two_ranks[0]))
    result = entrypoint("verify", *map(str, two_ranks))
    assert result.code == 3
    (warning,) = (line for line in result.out.splitlines() if "warning" in line)
    assert warning.startswith("  warning: rank 1: runs on CPUs ")


@pytest.mark.launch
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("verify", "1"), "process 1 is not a rank that the entrypoint started"),
        (("verify", "x"), "verify x: neither a run folder nor a process id"),
        (("stacks", "1"), "stacks: process 1 is not a rank that the entrypoint started"),
        (("stacks", "."), "stacks .: has no ranks.json"),
    ],
)
def test_what_is_no_rank_is_refused(entrypoint: Entrypoint, words: tuple[str, str], said: str) -> None:
    assert said in entrypoint.error_line(*words)


PLAN = make_test_plan(make_machine(4), {})
ODD = {
    "no JSON": {PLAN_VAR: "{", "RANK": "0"},
    "nested JSON": {PLAN_VAR: "[" * 100_000, "RANK": "0"},
    "no such local rank": {PLAN_VAR: PLAN.to_json(), "RANK": "0", "LOCAL_RANK": "7"},
    "local rank of many digits": {PLAN_VAR: PLAN.to_json(), "RANK": "0", "LOCAL_RANK": "9" * 5000},
    "plan without ranks": {PLAN_VAR: replace(PLAN, ranks=()).to_json(), "RANK": "0"},
}


@contextmanager
def sleeping(environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process that runs with these variables."""
    with killed_at_end(["sleep", "60"], env=environ) as process:
        started = Path(f"/proc/{process.pid}")  # it has its name before its variables (execve(2))
        wait_until(lambda: (started / "comm").read_text() == "sleep\n" and (started / "environ").read_bytes() != b"")
        yield process


@pytest.mark.parametrize("name", ODD)
def test_odd_rank_is_one_line(name: str) -> None:
    with sleeping(ODD[name]) as process:
        refusal(verify_running, (process.pid,), match=rf"^verify: process {process.pid} cannot be inspected \(")
        assert [rank.process for rank in stacks_of_ranks((process.pid,))] == [process.pid]


@pytest.mark.parametrize("rank", ["x", "-1", "9" * 5000, "\u0663", "\x1b[2J"])
def test_odd_number_of_a_rank_is_no_traceback(rank: str) -> None:
    with sleeping({PLAN_VAR: PLAN.to_json(), "RANK": rank}) as process:
        assert list(find_ranks((process.pid,), "verify")) == [str(process.pid)]
        (running,) = verify_running((process.pid,))
        assert all(line.isprintable() for line in describe(running))
        assert [rank.rank for rank in stacks_of_ranks((process.pid,))] == [running.observed.rank]


def test_escapes_in_a_plan_are_not_printed() -> None:
    plan = replace(PLAN, ranks=(RankPlan(0, (0,), 1),), environment=replace(PLAN.environment, preload=("/x/\x1b[2J",)))
    with sleeping({PLAN_VAR: plan.to_json(), "RANK": "0"}) as process:
        (running,) = verify_running((process.pid,))
    assert any("1b[2J" in line for line in describe(running))
    assert all(line.isprintable() for line in describe(running))
