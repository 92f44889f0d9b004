"""A process of another user may have any text in its variables: `verify` and `stacks` say so in one line."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import UserError
from entrypoint.doctor.running_ranks import describe, find_ranks, verify_running
from entrypoint.doctor.stacks import stacks_of_ranks
from entrypoint.plan.model import PLAN_VAR, RankPlan
from tests.factories import make_machine, make_test_plan
from tests.processes import killed_at_end

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
        while Path(f"/proc/{process.pid}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        yield process


@pytest.mark.parametrize("name", ODD)
def test_odd_rank_is_one_line(name: str) -> None:
    with sleeping(ODD[name]) as process:
        with pytest.raises(UserError, match=rf"^verify: process {process.pid} cannot be inspected \(") as error:
            verify_running((process.pid,))
        assert str(error.value).isprintable()
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
