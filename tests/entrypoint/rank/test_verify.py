"""What a rank really got, against what was planned."""

from __future__ import annotations

import os

import pytest
from msgspec.structs import replace

from entrypoint.rank.verify import ObservedRank, compare_ranks, compare_with_plan, observe_rank
from tests.factories import make_machine, make_test_plan

PLAN = make_test_plan(make_machine(4), {"LAUNCH_NPROC_PER_NODE": "2"})
INTEL = replace(PLAN, environment=replace(PLAN.environment, preload=("/lib/libiomp5.so",)))
AS_PLANNED = ObservedRank(1, 1, (2, 3), 2, "/lib/libgomp.so.1", ())


def test_compare_with_plan_equal_returns_nothing() -> None:
    assert compare_with_plan(PLAN, AS_PLANNED) == ()
    assert (
        compare_with_plan(INTEL, replace(AS_PLANNED, openmp="/lib/libiomp5.so", preloaded=INTEL.environment.preload))
        == ()
    )


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (replace(AS_PLANNED, cpus=(0,)), "rank 1: runs on CPUs 0, planned were 2-3"),
        (replace(AS_PLANNED, threads=8), "rank 1: torch has 8 threads, planned were 2"),
    ],
)
def test_compare_with_plan_difference_names_both_values(seen: ObservedRank, said: str) -> None:
    assert compare_with_plan(PLAN, seen) == (said,)


def test_compare_with_plan_missing_preload_is_reported() -> None:
    assert compare_with_plan(INTEL, AS_PLANNED) == (
        "rank 1: /lib/libiomp5.so was to be preloaded and is not loaded",
        "rank 1: the OpenMP runtime in charge is /lib/libgomp.so.1, planned was /lib/libiomp5.so",
    )


def test_compare_with_plan_unbound_rank_may_use_any_cpu() -> None:
    assert (
        compare_with_plan(
            replace(PLAN, binding=replace(PLAN.binding, cpu_binding="none")), replace(AS_PLANNED, cpus=(0, 1, 2, 3))
        )
        == ()
    )


def test_slowest_rank_is_named_with_its_node() -> None:
    others = [replace(AS_PLANNED, rank=rank, node="node1") for rank in range(3)]
    slow = replace(AS_PLANNED, rank=3, node="node2", threads=1)
    assert compare_ranks(others) == compare_ranks([replace(slow, gpu=0), *others]) == ()
    (line,) = compare_ranks([*others, slow])
    assert line.startswith("rank 3 on node2 computes with 1 threads, and rank 0 on node1 with 2: all wait for the")


def test_observe_rank_of_this_process() -> None:
    import torch

    seen = observe_rank(PLAN)
    assert seen.cpus == tuple(sorted(os.sched_getaffinity(0)))
    assert seen.threads == torch.get_num_threads()
    assert "omp" in seen.openmp
