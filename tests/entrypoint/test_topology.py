"""CPU lists and the CPUs of built /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from entrypoint.topology import format_cpu_list, parse_cpu_list, read_cpus
from tests.conftest import TreeBuilder


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-1,8,10-11\n", (0, 1, 8, 10, 11))],
)
def test_the_kernels_cpu_lists_are_read(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == ids


@given(st.sets(st.integers(0, 2000)))
def test_a_list_that_is_written_reads_back(ids: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(tuple(ids))) == tuple(sorted(ids))


@pytest.mark.parametrize(("interleaved", "sibling_of_0"), [(True, 4), (False, 1)])
def test_siblings_share_a_core_however_they_are_numbered(
    built_machine: TreeBuilder, interleaved: bool, sibling_of_0: int
) -> None:
    root = built_machine(sockets=1, cores_per_socket=4, threads_per_core=2, interleaved=interleaved)
    cpus, online, assumed = read_cpus(root, frozenset(range(8)))
    place = {cpu.id: (cpu.socket, cpu.core) for cpu in cpus}
    assert online == 8
    assert place[0] == place[sibling_of_0]
    assert len(set(place.values())) == 4
    assert assumed == ()


def test_numa_nodes_come_from_their_cpu_lists(built_machine: TreeBuilder) -> None:
    root = built_machine(sockets=2, cores_per_socket=8, nodes_per_socket=4)
    cpus, _, _ = read_cpus(root, frozenset(range(16)))
    assert [cpu.node for cpu in cpus] == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]


def test_only_the_masks_cpus_are_returned(built_machine: TreeBuilder) -> None:
    cpus, online, _ = read_cpus(built_machine(cores_per_socket=8), frozenset({2, 5}))
    assert [cpu.id for cpu in cpus] == [2, 5]
    assert online == 8


def test_a_hidden_sys_counts_each_cpu_as_a_core_and_says_so(tmp_path: Path) -> None:
    cpus, online, assumed = read_cpus(tmp_path, frozenset({0, 1, 2}))
    assert [(cpu.id, cpu.core) for cpu in cpus] == [(0, 0), (1, 1), (2, 2)]
    assert online == 3
    assert "hides the topology of CPUs 0-2" in assumed[0]
