"""What is left to others: fewer threads on the same cores, and where nothing is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.job.detect import Job
from entrypoint.plan.inputs import PlanInputs
from entrypoint.plan.model import RankPlan
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.factories import SCRIPT, make_machine, make_test_plan, reason_for, simulated_machine

LEFT = {
    "not quite one": (make_machine(4), 0.79, {}, [4]),
    "one": (make_machine(4), 0.81, {}, [3]),
    "one and a half of another": (make_machine(4), 1.5, {}, [3]),
    "half of the CPUs": (make_machine(4), 2.0, {}, [2]),
    "more, where fewer threads are no better": (make_machine(4), 2.9, {}, [4]),
    "one of two": (make_machine(2), 1.0, {}, [1]),
    "both of two": (make_machine(2), 2.0, {}, [2]),
    "the only one": (make_machine(1), 1.0, {}, [1]),
    "as many from each rank": (make_machine(8), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [3, 3]),
    "three of two ranks": (make_machine(8), 3.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [2, 2]),
    "ranks of one CPU": (make_machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [1, 1]),
    "a quota that fits next to them": (make_machine(8, quota=2), 3.0, {}, [2]),
    "a quota that fits next to many": (make_machine(8, quota=2), 6.0, {}, [2]),
    "a quota that does not": (make_machine(8, quota=6), 3.0, {}, [5]),
    "a user's own threads": (make_machine(4), 1.0, {"LAUNCH_THREADS": "4"}, [4]),
    "nothing by a user": (make_machine(4), 1.0, {"LAUNCH_RESERVE_CPUS": "0"}, [4]),
    "some by a user": (make_machine(4), 0.0, {"LAUNCH_RESERVE_CPUS": "3"}, [1]),
    "a scheduler's node": (make_machine(4), 1.0, {}, [4], Job(granted_cpus=4, hostnames=("n1",))),
    "ranks of mpirun": (make_machine(4), 1.0, {}, [2, 2], Job("Open MPI", 0, 2, 0, 2)),
    "one node of several": (make_machine(4), 1.0, {"LAUNCH_NNODES": "2", "MASTER_ADDR": "n1"}, [4]),
    "a GPU's rank": (make_machine(4, gpus=1), 1.0, {}, [4]),
}

TOO_MANY = ("more, where fewer threads are no better", "both of two", "the only one", "ranks of one CPU")


@pytest.mark.parametrize("case", LEFT)
def test_busy_cpus_are_reserved(case: str) -> None:
    node, busy, environ, threads, *job = LEFT[case]
    made = make_test_plan(replace(node, busy_cpus=busy), environ, *job)
    alone = make_test_plan(
        node, {name: value for name, value in environ.items() if name != "LAUNCH_RESERVE_CPUS"}, *job
    )
    assert [rank.threads for rank in made.ranks] == threads
    fewer = threads != [rank.threads for rank in alone.ranks]
    assert [rank.cpus for rank in made.ranks] == [rank.cpus for rank in alone.ranks], "still bound to all"
    assert ("less: " in reason_for(made, "threads")) == fewer
    assert any("`entrypoint tune`" in line for line in made.warnings) == (case in TOO_MANY)
    assert made.binding.reserved_cpus >= fewer


@pytest.mark.parametrize("busy", [0.0, 2.0])
def test_resumed_run_keeps_threads_on_same_cores(busy: float) -> None:
    def resumed(cores: int, environ: dict[str, str] | None = None) -> list[int]:
        node, chosen = replace(make_machine(cores), busy_cpus=busy), read_launch_settings(environ or {}, {})
        first = make_test_plan(make_machine(4))
        ranks, binding = (RankPlan(0, (0, 1, 2, 3), 3),), replace(first.binding, reserved_cpus=1)
        before = replace(first, ranks=ranks, binding=binding)
        made = make_plan(PlanInputs(chosen, node, Job(), SCRIPT, environ or {}, "python", previous=before))
        return [rank.threads for rank in made.ranks]

    assert resumed(4) == [3]
    assert resumed(8) == [8 - int(busy)], "other cores are planned again"
    assert resumed(4, {"LAUNCH_RESERVE_CPUS": "0"}) == [4]
    assert resumed(4, {"LAUNCH_THREADS": "2"}) == [2]


@pytest.mark.parametrize(("environ", "threads"), [({}, 6), ({"LAUNCH_CORE_TYPE": "physical"}, 12)])
def test_unused_cores_are_reserved_first(environ: dict[str, str], threads: int) -> None:
    made = make_test_plan(replace(simulated_machine("hybrid laptop"), busy_cpus=2.0), environ)
    assert made.ranks[0].threads == threads


def test_reserving_all_cpus_raises() -> None:
    with pytest.raises(UserError, match="LAUNCH_RESERVE_CPUS=4: leaves no CPU to a rank that has 4") as error:
        make_test_plan(make_machine(4), {"LAUNCH_RESERVE_CPUS": "4"})
    assert error.value.code == ExitCode.MACHINE
