"""What the tuner tries on machines of several kinds, and what it leaves as a user has set it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.machine.shared_libraries import Library
from entrypoint.tune.search import (
    RANKS,
    THREADS,
    even_layouts,
    later_stages,
    rank_thread_layouts,
)
from tests.factories import make_machine, make_test_plan, plan_inputs


@pytest.mark.parametrize(
    ("cores", "threads", "found"),
    [
        (1, 1, [(1, 1)]),
        (2, 2, [(1, 2), (2, 1)]),
        (6, 6, [(1, 6), (2, 3), (3, 2), (6, 1)]),
        (2, 1, [(1, 1)]),
        (12, 12, [(1, 12), (2, 6), (3, 4), (4, 3), (6, 2), (12, 1)]),
    ],
)
def test_even_layouts_use_all_threads(cores: int, threads: int, found: list[tuple[int, int]]) -> None:
    assert even_layouts(cores, threads) == found


@pytest.mark.parametrize(
    ("cpus", "found"),
    [(1, []), (2, [(1, 1), (2, 1)]), (6, [(1, 3), (1, 5), (2, 3), (3, 2), (6, 1)])],
)
def test_single_rank_may_leave_cores_free(cpus: int, found: list[tuple[int, int]]) -> None:
    layouts = rank_thread_layouts(plan_inputs(make_machine(cpus)), make_test_plan(make_machine(cpus)))
    assert [(int(one[RANKS]), int(one[THREADS])) for one in layouts] == found


@pytest.mark.parametrize(
    "given", [{"LAUNCH_NPROC_PER_NODE": "2"}, {"LAUNCH_THREADS": "1"}, {"LAUNCH_CPU_BINDING": "none"}]
)
def test_layouts_keep_user_ranks(given: dict[str, str]) -> None:
    plan = make_test_plan(make_machine(4))
    assert rank_thread_layouts(plan_inputs(make_machine(4), given), plan) == []
    assert rank_thread_layouts(plan_inputs(make_machine(4)), replace(plan, device="cuda")) == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ["none", "threads"]),
        ({"LAUNCH_CPU_BINDING": "ranks"}, []),
        ({"OMP_PROC_BIND": "close"}, []),
    ],
)
def test_thread_binding_is_a_candidate_unless_set_by_user(given: dict[str, str], found: list[str]) -> None:
    *_, bindings = later_stages(plan_inputs(make_machine(4), given), "cpu")
    assert [one["LAUNCH_CPU_BINDING"] for one in bindings] == found


LIBRARIES = (Library("tcmalloc", "/lib/t.so", ""), Library("intel", "/lib/i.so", ""), Library("jemalloc", None, "no"))


@pytest.mark.parametrize(
    ("given", "device", "counts"),
    [
        ({}, "cpu", [3 + 3, 2, 2]),
        ({"LAUNCH_OPENMP": "gnu"}, "cpu", [3, 2, 2]),
        ({"OMP_WAIT_POLICY": "active"}, "cpu", [2, 2, 2]),
        ({"LAUNCH_ALLOCATOR": "system", "LAUNCH_OPENMP": "gnu", "KMP_BLOCKTIME": "1"}, "cpu", [1, 1, 2]),
        ({"LD_PRELOAD": "/x/libmimalloc.so"}, "cpu", [3 + 3, 1, 2]),
        ({}, "cuda", [2]),
    ],
)
def test_candidates_are_available_and_not_set_by_user(given: dict[str, str], device: str, counts: list[int]) -> None:
    stages = later_stages(plan_inputs(replace(make_machine(4), libraries=LIBRARIES), given), device)
    for found, count in zip(stages, counts, strict=True):
        assert len(found) == len({tuple(sorted(one.items())) for one in found}) == count
        assert not any(name in one for one in found for name in given)
