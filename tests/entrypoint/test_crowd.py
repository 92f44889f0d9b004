"""How many ranks our trainer has where others keep too many CPUs busy to leave, and that a script stays one."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from entrypoint.job import Job
from entrypoint.machine import Machine
from entrypoint.plan import Plan
from entrypoint.planner import make_plan
from entrypoint.question import Question
from entrypoint.settings import read_launch_settings
from tests.conftest import CORES, PYTHON, Entrypoint, needs_two_cores
from tests.entrypoint.test_binding import there
from tests.entrypoint.test_left import TWO_NODES
from tests.entrypoint.test_planner import SCRIPT, machine, plan, why
from tests.neighbours import loaded, neighbours

RANKS = {
    "every CPU of two": (machine(2), 2.0, 4, {}, 2),
    "one of two, whose other one thread has": (machine(2), 1.0, 4, {}, 1),
    "nobody": (machine(2), 0.5, 4, {}, 1),
    "more than half of four": (machine(4), 3.0, 4, {}, 4),
    "half of four": (machine(4), 2.0, 4, {}, 1),
    "cores that so many ranks cannot share evenly": (machine(6), 6.0, 4, {}, 3),
    "a prime number of cores": (machine(5), 5.0, 4, {}, 1),
    "more cores than a batch has images for": (replace(machine(64), memory_bytes=64 << 30), 60.0, 8, {}, 8),
    "too little memory for so many": (machine(8), 8.0, 8, {}, 4),
    "a quota": (machine(4, quota=2), 4.0, 4, {}, 1),
    "several NUMA nodes": (TWO_NODES, 8.0, 8, {}, 2),
    "a person's number of ranks": (machine(2), 2.0, 4, {"LAUNCH_NPROC_PER_NODE": "1"}, 1),
    "a person's threads": (machine(2), 2.0, 4, {"LAUNCH_THREADS": "2"}, 1),
    "a person's threads by OpenMP's variable": (machine(2), 2.0, 4, {"OMP_NUM_THREADS": "2"}, 1),
    "a person who starts one": (machine(2), 2.0, 4, {"LAUNCH_WITH": "direct"}, 1),
    "one who looks at no neighbours": (machine(2), 2.0, 4, {"LAUNCH_NEIGHBOURS": "0"}, 1),
    "a scheduler's node": (machine(2), 2.0, 4, {}, 1, Job(granted_cpus=2, nodes=("n1",))),
    "a GPU's rank": (machine(2, gpus=1), 2.0, 4, {}, 1),
}


def crowded(
    node: Machine,
    busy: float,
    most: int,
    environ: Mapping[str, str] | None = None,
    job: Job | None = None,
    before: Plan | None = None,
) -> Plan:
    environ, node = environ or {}, replace(node, kept_busy=busy)
    chosen = read_launch_settings(environ, {})
    return make_plan(Question(chosen, node, job or Job(), SCRIPT, environ, "python", before=before, most_ranks=most))


@pytest.mark.parametrize("case", RANKS)
def test_so_many_ranks_where_others_keep_busy(case: str) -> None:
    node, busy, most, environ, ranks, *job = RANKS[case]
    made = crowded(node, busy, most, environ, *job)
    assert made.nproc_per_node == ranks
    several = ranks > 1 and node is not TWO_NODES
    assert ("of which each rank has a part; LAUNCH_NPROC_PER_NODE=1 has one rank" in why(made, "ranks")) == several
    assert sum(rank.threads for rank in made.ranks) <= len(node.cpus)


def test_a_persons_script_stays_one_rank_and_the_plan_says_what_more_would_have() -> None:
    made = crowded(machine(2), 2.0, 1)
    assert made.nproc_per_node == 1
    assert "others keep 2.0 of 2 CPUs busy, of which each rank would have a part: LAUNCH_NPROC_PER_NODE=2" in why(
        made, "ranks"
    )
    assert why(crowded(machine(1), 1.0, 1), "ranks") == "one rank with all cores: one NUMA node"


@pytest.mark.parametrize("busy", [0.0, 2.0])
def test_a_run_that_goes_on_has_as_many_as_it_began_with_whoever_is_beside_it_now(busy: float) -> None:
    began = crowded(machine(2), 2.0, 4)
    goes_on = crowded(machine(2), busy, 4, before=began)
    assert goes_on.nproc_per_node == 2
    assert goes_on.crowd == began.crowd == 2
    assert why(goes_on, "ranks") == "as the run had that this one goes on with"
    assert crowded(machine(2), busy, 4, before=crowded(machine(2), 0.0, 4)).nproc_per_node == 1
    assert crowded(machine(1), busy, 4, before=began).nproc_per_node == 1, "on a smaller machine"
    alone = crowded(machine(2), 2.0, 4, {"LAUNCH_NPROC_PER_NODE": "1"})
    assert crowded(machine(2), busy, 4, before=alone).nproc_per_node == 1


def test_cores_that_no_rank_is_on_are_others_first(tmp_path: Path) -> None:
    laptop = there(tmp_path, "hybrid laptop")
    assert crowded(laptop, 11.0, 6).nproc_per_node == 1
    assert crowded(laptop, 12.0, 6).nproc_per_node == 3, "of 6 cores, in 8 GiB"


def test_nothing_else_of_a_plan_hangs_on_who_may_be_several() -> None:
    assert crowded(machine(4), 0.0, 4) == plan(machine(4))


@needs_two_cores
@pytest.mark.launch
def test_a_run_beside_neighbours_on_every_cpu_has_several_ranks_and_goes_on_with_them(
    entrypoint: Entrypoint, tmp_path: Path
) -> None:
    env = {"LAUNCH_NEIGHBOURS": "auto", "TRAIN_EPOCHS": "12", "TRAIN_RUN_NAME": "mine", "TRAIN_TENSORBOARD": "0"}
    with neighbours(sorted(os.sched_getaffinity(0))):
        words = (*loaded(tmp_path, CORES + 1), PYTHON, "-m", "entrypoint")
        done = entrypoint("train", env=env, command=words)
    assert done.code == 0, done.err
    began = json.loads((tmp_path / "runs/mine/plan.json").read_text())
    assert began["nproc_per_node"] > 1, done.err
    assert entrypoint.summary("mine")["test_accuracy"] >= 97
    goes_on = entrypoint.plan("train", env=env | {"TRAIN_RESUME": "auto"})
    assert (goes_on["nproc_per_node"], goes_on["crowd"]) == (began["nproc_per_node"], began["crowd"])
    assert entrypoint.plan("train", env=env | {"LAUNCH_NEIGHBOURS": "0"})["nproc_per_node"] == 1
