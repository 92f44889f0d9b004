"""What a process may use, on built machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from entrypoint.machine import read_machine
from tests.conftest import TreeBuilder


def test_this_machine_is_read_as_the_kernel_tells_it() -> None:
    machine = read_machine()
    assert [cpu.id for cpu in machine.cpus] == sorted(os.sched_getaffinity(0))
    assert machine.online_cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert machine.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.01
    assert machine.shm_bytes > 0
    assert 1 <= machine.budget_cores <= len(machine.physical_cores)


def test_physical_cores_are_the_first_sibling_of_each(built_machine: TreeBuilder) -> None:
    root = built_machine(sockets=2, cores_per_socket=2, threads_per_core=2)
    machine = read_machine(root, frozenset(range(8)))
    assert [cpu.id for cpu in machine.physical_cores] == [0, 1, 2, 3]


def test_a_mask_of_second_siblings_still_counts_as_cores(built_machine: TreeBuilder) -> None:
    root = built_machine(sockets=1, cores_per_socket=4, threads_per_core=2)
    machine = read_machine(root, frozenset({5, 6}))
    assert [cpu.id for cpu in machine.physical_cores] == [5, 6]


@pytest.mark.parametrize(("quota", "budget"), [("max", 4), ("350000", 3), ("150000", 1), ("50000", 1), ("900000", 4)])
def test_the_quota_caps_the_budget(built_machine: TreeBuilder, quota: str, budget: int) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": f"{quota} 100000\n"}
    machine = read_machine(built_machine(cores_per_socket=4, files=files), frozenset(range(4)))
    assert machine.budget_cores == budget


def test_the_memory_limit_is_the_smaller_of_node_and_cgroup(built_machine: TreeBuilder) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1 << 30}\n"}
    machine = read_machine(built_machine(memory_kib=8 << 20, files=files), frozenset({0}))
    assert machine.memory_bytes == 1 << 30


def test_an_empty_root_is_no_error(tmp_path: Path) -> None:
    machine = read_machine(tmp_path, frozenset({0}))
    assert machine.budget_cores == 1
    assert machine.memory_bytes == 0
    assert machine.gpus == ()
