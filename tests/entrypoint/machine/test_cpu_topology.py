"""CPU lists and the CPUs of built /sys trees."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from entrypoint.machine.cpu_topology import format_cpu_list, parse_cpu_list, read_topology
from tests.factories import simulated_machine
from tests.machines import MACHINES, smp


@pytest.mark.parametrize(
    ("text", "ids"),
    [("", ()), ("0", (0,)), ("0-3", (0, 1, 2, 3)), ("0-1,8,10-11\n", (0, 1, 8, 10, 11))],
)
def test_parse_cpu_list_reads_kernel_format(text: str, ids: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == ids


@given(st.sets(st.integers(0, 2000)))
def test_format_cpu_list_round_trip(ids: set[int]) -> None:
    assert parse_cpu_list(format_cpu_list(tuple(ids))) == tuple(sorted(ids))


def test_read_topology_without_sys_assumes_one_core_per_cpu(tmp_path: Path) -> None:
    found = read_topology(tmp_path, frozenset({0, 1, 2}))
    assert [(cpu.id, cpu.core) for cpu in found.cpus] == [(0, 0), (1, 1), (2, 2)]
    assert found.online_cpus == 3
    assert "hides the topology of CPUs 0-2" in found.assumptions[0]


def test_read_topology_without_nodes_uses_sockets(tmp_path: Path) -> None:
    root = smp(2, 4).build(tmp_path)
    shutil.rmtree(root / "sys/devices/system/node")
    found = read_topology(root, frozenset(range(8)))
    assert [cpu.node for cpu in found.cpus] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.assumptions == ("/sys hides the NUMA nodes: each socket counts as one",)


def test_read_topology_without_siblings_uses_core_id(tmp_path: Path) -> None:
    root = smp(2, 2, 2).build(tmp_path)
    for name in ("core_cpus_list", "thread_siblings_list"):
        for path in root.glob(f"sys/devices/system/cpu/cpu*/topology/{name}"):
            path.unlink()
    places = {(cpu.socket, cpu.core) for cpu in read_topology(root, frozenset(range(8))).cpus}
    assert len(places) == 4


@pytest.mark.parametrize(
    ("name", "caches"),
    [
        ("2-socket EPYC 7742", 32),
        ("2-socket EPYC 9654", 24),
        ("2-socket Xeon 8480+, SNC-4", 8),
        ("Grace", 1),
        ("desktop with P- and E-cores", 1),
    ],
)
def test_read_topology_groups_cpus_by_l3_cache(name: str, caches: int) -> None:
    found = simulated_machine(name)
    groups = {cpu.cache for cpu in found.cpus}
    assert len(groups) == caches
    assert -1 not in groups
    siblings = [{cpu.cache for cpu in found.cpus if (cpu.socket, cpu.core) == (0, core)} for core in (0, 1, 2)]
    assert max(map(len, siblings)) <= 1


def test_read_topology_without_l3_cache_is_one_group(tmp_path: Path) -> None:
    found = read_topology(smp(1, 4).build(tmp_path), frozenset(range(4)))
    assert {cpu.cache for cpu in found.cpus} == {-1}


@pytest.mark.parametrize(
    ("name", "cores", "sockets", "nodes", "slow"),
    [
        ("VM of 1 CPU", 1, 1, 1, 0),
        ("VM of 2 CPUs", 2, 1, 1, 0),
        ("hybrid laptop", 14, 1, 1, 8),
        ("Arm big.LITTLE", 8, 1, 1, 4),
        ("2-socket Xeon, siblings adjacent", 56, 2, 2, 0),
        ("2-socket Xeon, siblings interleaved", 56, 2, 2, 0),
        ("2-socket Xeon, SNC-4", 112, 2, 8, 0),
        ("2-socket EPYC, NPS4", 128, 2, 8, 0),
        ("2-socket EPYC 7742", 128, 2, 2, 0),
        ("2-socket EPYC 9654", 192, 2, 2, 0),
        ("2-socket Xeon 8480+, SNC-4", 112, 2, 8, 0),
        ("2-socket Xeon 6780E", 288, 2, 2, 0),
        ("Graviton 4", 96, 1, 1, 0),
        ("Grace", 72, 1, 1, 0),
        ("desktop with P- and E-cores", 24, 1, 1, 16),
        ("2-socket Arm without SMT", 128, 2, 2, 0),
        ("8-GPU NVLink node", 40, 2, 2, 0),
        ("8-GPU NVSwitch node", 112, 2, 2, 0),
        ("Kubernetes pod with quota 3.5", 32, 2, 2, 0),
        ("Slurm step with a cpuset", 4, 1, 1, 0),
        ("1,024 CPUs", 512, 4, 8, 0),
        ("nodes with gaps", 16, 2, 2, 0),
        ("offline siblings", 8, 1, 1, 0),
    ],
)
def test_read_topology_of_each_machine(name: str, cores: int, sockets: int, nodes: int, slow: int) -> None:
    found = simulated_machine(name)
    assert len({(cpu.socket, cpu.core) for cpu in found.cpus}) == cores
    assert len({cpu.socket for cpu in found.cpus}) == sockets
    assert len({cpu.node for cpu in found.cpus}) == nodes
    assert sum(cpu.efficiency for cpu in found.cpus) == slow
    assert found.online_cpus == len(MACHINES[name]().cpus)
    assert found.assumptions == ()


def test_read_topology_nodes_without_memory_or_cpus() -> None:
    found = simulated_machine("nodes with gaps")
    assert {cpu.node for cpu in found.cpus} == {0, 8}
    assert found.memory_nodes == (0, 252, 253, 254, 255)
