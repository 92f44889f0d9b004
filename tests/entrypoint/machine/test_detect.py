"""What a process may use, on built machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

from entrypoint.machine.detect import detect_machine
from tests.conftest import TreeBuilder


def test_this_machine_is_read_as_the_kernel_tells_it() -> None:
    machine = detect_machine()
    assert [cpu.id for cpu in machine.cpus] == sorted(os.sched_getaffinity(0))
    assert machine.online_cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert machine.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.01
    assert machine.container.shm_bytes > 0


def test_the_memory_limit_is_the_smaller_of_node_and_cgroup(built_machine: TreeBuilder) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1 << 30}\n"}
    machine = detect_machine(built_machine(memory_kib=8 << 20, files=files), frozenset({0}))
    assert machine.memory_bytes == 1 << 30


def test_an_empty_root_is_no_error(tmp_path: Path) -> None:
    machine = detect_machine(tmp_path, frozenset({0}))
    assert [cpu.id for cpu in machine.cpus] == [0]
    assert machine.memory_bytes == 0
    assert machine.gpus == ()


def test_the_first_cpus_flags_are_told(built_machine: TreeBuilder) -> None:
    cpuinfo = (
        "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t: fpu avx2 avx512f amx_bf16\n\nvendor_id\t: other\n"
    )
    machine = detect_machine(built_machine(files={"proc/cpuinfo": cpuinfo}), frozenset({0}))
    assert machine.cpu_flags == ("amx_bf16", "avx2", "avx512f")
    assert (machine.cpu_vendor, machine.cpu_model) == ("GenuineIntel", "Xeon")
