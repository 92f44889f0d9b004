"""A process of another user may have any text in its variables: `verify` and `stacks` say so in one line."""

from __future__ import annotations

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
    "compressed nothing": {PLAN_VAR: "zlib:!", "RANK": "0"},
    "no such local rank": {PLAN_VAR: PLAN.to_variable(), "RANK": "0", "LOCAL_RANK": "7"},
    "local rank of many digits": {PLAN_VAR: PLAN.to_variable(), "RANK": "0", "LOCAL_RANK": "9" * 5000},
    "plan without ranks": {PLAN_VAR: replace(PLAN, ranks=()).to_variable(), "RANK": "0"},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_rank_is_one_line(name: str) -> None:
    with killed_at_end(["sleep", "60"], env=ODD[name]) as process:
        with pytest.raises(UserError, match=rf"^verify: process {process.pid} cannot be inspected \(") as error:
            verify_running((process.pid,))
        assert str(error.value).isprintable()
        assert [rank.process for rank in stacks_of_ranks((process.pid,))] == [process.pid]


@pytest.mark.parametrize("rank", ["x", "-1", "9" * 5000, "\u0663", "\x1b[2J"])
def test_odd_number_of_a_rank_is_no_traceback(rank: str) -> None:
    with killed_at_end(["sleep", "60"], env={PLAN_VAR: PLAN.to_variable(), "RANK": rank}) as process:
        assert list(find_ranks((process.pid,), "verify")) == [str(process.pid)]
        (running,) = verify_running((process.pid,))
        assert all(line.isprintable() for line in describe(running))
        assert [rank.rank for rank in stacks_of_ranks((process.pid,))] == [running.observed.rank]


def test_escapes_in_a_plan_are_not_printed() -> None:
    plan = replace(PLAN, ranks=(RankPlan(0, (0,), 1),), environment=replace(PLAN.environment, preload=("/x/\x1b[2J",)))
    with killed_at_end(["sleep", "60"], env={PLAN_VAR: plan.to_variable(), "RANK": "0"}) as process:
        (running,) = verify_running((process.pid,))
    assert any("1b[2J" in line for line in describe(running))
    assert all(line.isprintable() for line in describe(running))
