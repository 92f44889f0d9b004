"""Sharing cores among ranks, as properties over generated machines."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings, strategies as st

from entrypoint.job.detect import Job
from entrypoint.machine.detect import Machine
from entrypoint.plan.cpu_budget import (
    Core,
    assign_cores,
    assign_near_gpus,
    assign_threads,
    compute_cpu_budget,
    cpus_of,
    split,
)
from tests.conftest import FUZZ_EXAMPLES as EXAMPLES
from tests.strategies import KINDS, grants, machines


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(st.integers(0, 5000), st.integers(1, 300))
def test_even_split_differs_by_at_most_one(total: int, parts: int) -> None:
    sizes = split(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines(), KINDS, st.integers(1, 64))
def test_shares_are_disjoint_equal_and_inside_the_budget(machine: Machine, kind: str, nproc: int) -> None:
    cores = compute_cpu_budget(machine, Job(), kind, nproc).cores
    shares = assign_cores(cores, nproc)
    assert len(shares) == nproc
    assert all(set(share) <= set(cores) for share in shares)
    if nproc <= len(cores):
        assigned = [cpu for share in shares for cpu in cpus_of(share)]
        assert len(set(assigned)) == len(assigned)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(set(share) == set(cores) for share in shares)
    assert shares == assign_cores(cores, nproc), "the same input gives the same plan"


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines(), st.integers(1, 64))
def test_assign_cores_keeps_rank_in_one_node(machine: Machine, nproc: int) -> None:
    cores = compute_cpu_budget(machine, Job(), "physical").cores
    sizes = Counter(core.numa_node for core in cores)
    shares = assign_cores(cores, nproc)
    if nproc <= len(cores) and len(cores) // nproc <= max(sizes.values()):
        assert all(len({core.numa_node for core in share}) == 1 for share in shares)
        smallest = min(map(len, shares))
        assert sum(count // (smallest + 1) for count in sizes.values()) < nproc, "no larger size would have fitted"
    elif nproc <= len(cores):
        assert sum(map(len, shares)) == len(cores), "what must cross leaves nothing over"


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines(), grants, KINDS, st.integers(1, 64))
def test_threads_are_within_quota_and_cores(machine: Machine, job: Job, kind: str, nproc: int) -> None:
    budget = compute_cpu_budget(machine, job, kind, nproc)
    cpus = tuple(cpus_of(share) for share in assign_cores(budget.cores, nproc))
    threads = assign_threads(budget.threads, cpus)
    assert min(threads) >= 1
    assert sum(threads) <= max(budget.threads, nproc)
    assert all(count <= len(share) for count, share in zip(threads, cpus, strict=True))


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(machines(), st.lists(st.none() | st.integers(0, 40), min_size=1, max_size=16))
def test_assign_near_gpus_all_near_or_none(machine: Machine, wanted: list[int | None]) -> None:
    cores = compute_cpu_budget(machine, Job(), "auto", len(wanted)).cores
    shares = assign_near_gpus(cores, wanted)
    room = Counter(core.numa_node[1] for core in cores)
    possible = None not in wanted and all(
        room[node] >= count for node, count in Counter(wanted).items() if node is not None
    )
    assert (shares is not None) is possible
    if shares is not None:
        assert all(core.numa_node[1] == node for share, node in zip(shares, wanted, strict=True) for core in share)
        assigned = [core for share in shares for core in share]
        assert len(set(assigned)) == len(assigned)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(
    ("nodes", "nproc", "sizes"),
    [
        ([4, 4], 1, [8]),
        ([4, 4], 2, [4, 4]),
        ([4, 4], 3, [2, 2, 3]),
        ([4, 4], 4, [2, 2, 2, 2]),
        ([15, 1], 2, [8, 7]),
        ([1, 1, 1, 1], 3, [1, 1, 1]),
        ([8, 8, 8, 8], 6, [4, 4, 4, 4, 5, 5]),
    ],
)
def test_assign_cores_sizes_per_numa_node(nodes: list[int], nproc: int, sizes: list[int]) -> None:
    cores = [Core((node, node), (core + 100 * node,)) for node, count in enumerate(nodes) for core in range(count)]
    assert [len(share) for share in assign_cores(cores, nproc)] == sizes


# The cores of a mask in each of a node's L3 caches, the ranks, and the cores of each rank.
CACHES = [
    ([4, 4], 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
    ([3, 4, 4, 3], 4, [(3, 4, 5, 6), (7, 8, 9, 10), (0, 1, 2), (11, 12, 13)]),  # in order ranks would cross
    ([4, 4, 4], 2, [tuple(range(6)), tuple(range(6, 12))]),  # none fits into a cache
    ([8, 8], 3, [tuple(range(6)), (6, 7, 8, 9, 10), (11, 12, 13, 14, 15)]),  # 6 + 5 + 5 do not fit into 8 + 8
    ([2, 6], 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),  # 4 + 4 do not fit either
    ([2, 4, 2], 4, [(0, 1), (6, 7), (2, 3), (4, 5)]),
]


@pytest.mark.parametrize(("caches", "nproc", "expected"), CACHES)
def test_ranks_cross_no_l3_cache_if_their_shares_fit(
    caches: list[int], nproc: int, expected: list[tuple[int, ...]]
) -> None:
    groups = [cache for cache, count in enumerate(caches) for _ in range(count)]
    cores = [Core((0, 0), (number,), cache) for number, cache in enumerate(groups)]
    assert [cpus_of(share) for share in assign_cores(cores, nproc)] == expected


@pytest.mark.generated
@settings(max_examples=EXAMPLES)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=16), st.integers(1, 32))
def test_l3_caches_change_no_rank_size(caches: list[int], nproc: int) -> None:
    groups = [cache for cache, count in enumerate(caches) for _ in range(count)]
    cores = [Core((0, 0), (number,), cache) for number, cache in enumerate(groups)]
    blind = [Core((0, 0), (number,)) for number in range(len(groups))]
    shares = assign_cores(cores, nproc)
    assert [len(share) for share in shares] == [len(share) for share in assign_cores(blind, nproc)]
    if nproc <= len(cores):
        used = [cpu for share in shares for cpu in cpus_of(share)]
        assert len(set(used)) == len(used)


def test_gpu_locality_is_dropped_if_a_node_has_too_few_cores() -> None:
    cores = [Core((0, 0), (0,)), Core((1, 1), (1,)), Core((1, 1), (2,))]
    assert assign_near_gpus(cores, [0, 0]) is None
    assert assign_near_gpus(cores, [1, 1]) == ((cores[1],), (cores[2],))
