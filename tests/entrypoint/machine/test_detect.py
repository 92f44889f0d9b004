"""What a process may use, on built machines and on this one."""

from __future__ import annotations

import os
from pathlib import Path

from entrypoint.machine.detect import detect_machine
from tests.conftest import TreeBuilder


def test_detect_machine_reads_this_machine() -> None:
    machine = detect_machine()
    assert [cpu.id for cpu in machine.cpus] == sorted(os.sched_getaffinity(0))
    assert machine.online_cpus == os.sysconf("SC_NPROCESSORS_ONLN")
    assert machine.memory_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 1.01
    assert machine.container.shm_bytes > 0


def test_detect_machine_memory_is_smaller_limit(built_machine: TreeBuilder) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{1 << 30}\n"}
    machine = detect_machine(built_machine(memory_kib=8 << 20, files=files), frozenset({0}))
    assert machine.memory_bytes == 1 << 30


def test_empty_root_raises_no_error(tmp_path: Path) -> None:
    machine = detect_machine(tmp_path, frozenset({0}))
    assert [cpu.id for cpu in machine.cpus] == [0]
    assert machine.memory_bytes == 0
    assert machine.gpus == ()


def test_detect_machine_reads_first_cpu_flags(built_machine: TreeBuilder) -> None:
    cpuinfo = (
        "vendor_id\t: GenuineIntel\nmodel name\t: Xeon\nflags\t: fpu avx2 avx512f amx_bf16\n\nvendor_id\t: other\n"
    )
    machine = detect_machine(built_machine(files={"proc/cpuinfo": cpuinfo}), frozenset({0}))
    assert machine.cpu_flags == ("amx_bf16", "avx2", "avx512f")
    assert (machine.cpu_vendor, machine.cpu_model) == ("GenuineIntel", "Xeon")
