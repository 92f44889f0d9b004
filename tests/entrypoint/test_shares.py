"""Sharing cores among ranks, as properties over built machines."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.machine import Machine
from entrypoint.shares import share_cpus, share_threads, split
from entrypoint.topology import Cpu


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    sockets, cores, threads = draw(st.integers(1, 4)), draw(st.integers(1, 16)), draw(st.integers(1, 2))
    total = sockets * cores
    cpus = [
        Cpu(core + thread * total, core % cores, core // cores, core // cores)
        for thread in range(threads)
        for core in range(total)
    ]
    mask = draw(st.sets(st.sampled_from(cpus), min_size=1))
    quota = draw(st.none() | st.floats(0.1, 200))
    allowed = tuple(sorted(mask, key=lambda cpu: cpu.id))
    return Machine("m", "cpu", "vendor", allowed, len(cpus), quota, 1 << 33, 1 << 26)


@given(st.integers(0, 5000), st.integers(1, 300))
def test_split_gives_equal_parts_to_within_one(total: int, parts: int) -> None:
    sizes = split(total, parts)
    assert sum(sizes) == total
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


@given(machines(), st.integers(1, 64))
def test_shares_are_disjoint_whole_cores_of_the_mask(machine: Machine, nproc: int) -> None:
    shares = share_cpus(machine, nproc)
    cores = {cpu.id for cpu in machine.physical_cores}
    assert len(shares) == nproc
    assert all(set(share) <= cores for share in shares)
    if nproc <= len(cores):
        dealt = [cpu for share in shares for cpu in share]
        assert len(set(dealt)) == len(dealt)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert all(set(share) == cores for share in shares)


@given(machines(), st.integers(1, 64))
def test_no_rank_crosses_a_node_where_its_share_fits_into_one(machine: Machine, nproc: int) -> None:
    node_of = {cpu.id: (cpu.socket, cpu.node) for cpu in machine.cpus}
    sizes = Counter(node_of[cpu.id] for cpu in machine.physical_cores)
    shares = share_cpus(machine, nproc)
    if nproc <= len(machine.physical_cores) and len(machine.physical_cores) // nproc <= max(sizes.values()):
        assert all(len({node_of[cpu] for cpu in share}) == 1 for share in shares)
    elif nproc <= len(machine.physical_cores):
        assert sum(map(len, shares)) == len(machine.physical_cores), "what must cross leaves nothing over"


@given(machines(), st.integers(1, 64))
def test_no_size_that_is_larger_by_one_would_have_fitted(machine: Machine, nproc: int) -> None:
    sizes = Counter((cpu.socket, cpu.node) for cpu in machine.physical_cores)
    if nproc <= len(machine.physical_cores):
        smallest = min(map(len, share_cpus(machine, nproc)))
        assert sum(cores // (smallest + 1) for cores in sizes.values()) < nproc


@given(machines(), st.integers(1, 64))
def test_threads_never_exceed_the_budget_unless_ranks_do(machine: Machine, nproc: int) -> None:
    cpus = share_cpus(machine, nproc)
    threads = share_threads(machine, cpus)
    assert min(threads) >= 1
    assert sum(threads) <= max(machine.budget_cores, nproc)
    assert all(count <= len(share) for count, share in zip(threads, cpus, strict=True))


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
def test_nodes_are_filled_as_an_expert_would(nodes: list[int], nproc: int, sizes: list[int]) -> None:
    cpus = [Cpu(core + 100 * node, core, node, node) for node, cores in enumerate(nodes) for core in range(cores)]
    machine = Machine("m", "cpu", "vendor", tuple(cpus), len(cpus), None, 1 << 33, 1 << 26)
    assert [len(share) for share in share_cpus(machine, nproc)] == sizes
