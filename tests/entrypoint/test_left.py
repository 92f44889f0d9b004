"""What is left to others: fewer threads on the same cores, and where nothing is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.errors import Exit, Refused
from entrypoint.job import Job
from entrypoint.planner import make_plan
from entrypoint.question import Question
from entrypoint.settings import read_launch_settings
from entrypoint.topology import Cpu
from tests.entrypoint.test_binding import there
from tests.entrypoint.test_planner import SCRIPT, machine, plan, why

LEFT = {
    "not quite one": (machine(4), 0.79, {}, [4]),
    "one": (machine(4), 0.81, {}, [3]),
    "one and a half of another": (machine(4), 1.5, {}, [3]),
    "half of the CPUs": (machine(4), 2.0, {}, [2]),
    "more, where fewer threads are no better": (machine(4), 2.9, {}, [4]),
    "one of two": (machine(2), 1.0, {}, [1]),
    "both of two": (machine(2), 2.0, {}, [2]),
    "the only one": (machine(1), 1.0, {}, [1]),
    "as many from each rank": (machine(8), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [3, 3]),
    "three of two ranks": (machine(8), 3.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [2, 2]),
    "ranks of one CPU": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [1, 1]),
    "a quota that fits beside them": (machine(8, quota=2), 3.0, {}, [2]),
    "a quota that fits beside many": (machine(8, quota=2), 6.0, {}, [2]),
    "a quota that does not": (machine(8, quota=6), 3.0, {}, [5]),
    "a person's own threads": (machine(4), 1.0, {"LAUNCH_THREADS": "4"}, [4]),
    "nothing by a person": (machine(4), 1.0, {"LAUNCH_NEIGHBOURS": "0"}, [4]),
    "some by a person": (machine(4), 0.0, {"LAUNCH_NEIGHBOURS": "3"}, [1]),
    "a scheduler's node": (machine(4), 1.0, {}, [4], Job(granted_cpus=4, nodes=("n1",))),
    "ranks of mpirun": (machine(4), 1.0, {}, [2, 2], Job("Open MPI", 0, 2, 0, 2)),
    "one node of several": (machine(4), 1.0, {"LAUNCH_NNODES": "2", "MASTER_ADDR": "n1"}, [4]),
    "a GPU's rank": (machine(4, gpus=1), 1.0, {}, [4]),
}

TOO_MANY = ("more, where fewer threads are no better", "both of two", "the only one", "ranks of one CPU")


@pytest.mark.parametrize("case", LEFT)
def test_what_others_keep_busy_is_left_to_them(case: str) -> None:
    node, busy, environ, threads, *job = LEFT[case]
    made = plan(replace(node, kept_busy=busy), environ, *job)
    alone = plan(node, {name: value for name, value in environ.items() if name != "LAUNCH_NEIGHBOURS"}, *job)
    assert [rank.threads for rank in made.ranks] == threads
    fewer = threads != [rank.threads for rank in alone.ranks]
    if case != "ranks of one CPU":
        assert [rank.cpus for rank in made.ranks] == [rank.cpus for rank in alone.ranks], "bound to all as ever"
    assert made.warnings == alone.warnings
    assert ("less what is left to others" in why(made, "threads")) == fewer
    assert ("too many to leave" in why(made, "threads")) == (case in TOO_MANY)
    assert made.neighbours >= fewer


TWO_NODES = replace(machine(8), cpus=tuple(Cpu(core, core, 0, core // 4) for core in range(8)))
ALL, HALVES, OWN = [(0, 1)] * 2, [(0, 1, 2, 3)] * 4 + [(4, 5, 6, 7)] * 4, [(0,), (1,)]
SHARED = {
    "one of two": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, ALL),
    "both": (machine(2), 2.0, {"LAUNCH_NPROC_PER_NODE": "2"}, ALL),
    "within NUMA nodes": (TWO_NODES, 1.0, {"LAUNCH_NPROC_PER_NODE": "8"}, HALVES),
    "nobody": (machine(2), 0.5, {"LAUNCH_NPROC_PER_NODE": "2"}, OWN),
    "some that can be left room": (machine(4), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, [(0, 1), (2, 3)]),
    "a person who binds": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_BIND": "ranks"}, OWN),
    "one who does not say how": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_BIND": "auto"}, ALL),
    "one who pins threads": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2", "OMP_PROC_BIND": "close"}, OWN),
    "one who looks at no neighbours": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_NEIGHBOURS": "0"}, OWN),
    "a scheduler": (machine(2), 1.0, {"LAUNCH_NPROC_PER_NODE": "2"}, OWN, Job(granted_cpus=2, nodes=("n1",))),
    "ranks on GPUs": (machine(2, gpus=2), 1.0, {}, OWN),
}


@pytest.mark.parametrize("case", SHARED)
def test_ranks_beside_too_many_to_leave_share_their_numa_nodes_cores(case: str) -> None:
    node, busy, environ, cpus, *job = SHARED[case]
    made = plan(replace(node, kept_busy=busy), environ, *job)
    assert [rank.cpus for rank in made.ranks] == cpus
    assert ("LAUNCH_BIND=ranks gives each its own" in why(made, "cores")) == (cpus in (ALL, HALVES))
    assert made.bind == "ranks", "a rank is still bound, and verified after it has started"


def test_a_run_that_goes_on_shares_as_the_node_is_now_since_no_bit_hangs_on_it() -> None:
    chosen, node = read_launch_settings({"LAUNCH_NPROC_PER_NODE": "2"}, {}), replace(machine(2), kept_busy=1.0)
    goes_on = make_plan(Question(chosen, node, Job(), SCRIPT, {}, "python", before=plan(machine(2))))
    assert [rank.cpus for rank in goes_on.ranks] == ALL
    assert [rank.threads for rank in goes_on.ranks] == [1, 1]


@pytest.mark.parametrize(("environ", "threads"), [({}, 6), ({"LAUNCH_CORES": "physical"}, 12)])
def test_cores_that_no_rank_is_on_are_left_first(tmp_path: Path, environ: dict[str, str], threads: int) -> None:
    made = plan(replace(there(tmp_path, "hybrid laptop"), kept_busy=2.0), environ)
    assert made.ranks[0].threads == threads


def test_more_left_to_others_than_there_is_is_refused() -> None:
    with pytest.raises(Refused, match="LAUNCH_NEIGHBOURS=4: leaves no CPU to a rank that has 4; lower it") as error:
        plan(machine(4), {"LAUNCH_NEIGHBOURS": "4"})
    assert error.value.code == Exit.MACHINE
