"""Quotas and memory limits of built cgroup trees, v1 and v2."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.machine.cgroup import read_limits

V2 = "0::/job/step\n"
V1 = "5:memory:/job\n4:cpu,cpuacct:/job\n1:name=systemd:/x\n"
CASES = {
    "no limit": ({"proc/self/cgroup": V2, "sys/fs/cgroup/job/step/cpu.max": "max 100000"}, None, None),
    "v2, own level": ({"proc/self/cgroup": V2, "sys/fs/cgroup/job/step/cpu.max": "150000 100000"}, 1.5, None),
    "v2, a level above": (
        {
            "proc/self/cgroup": V2,
            "sys/fs/cgroup/job/step/cpu.max": "400000 100000",
            "sys/fs/cgroup/job/cpu.max": "200000 100000",
        },
        2.0,
        None,
    ),
    "v2, a container that sees only itself": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "350000 100000", "sys/fs/cgroup/memory.max": "1000"},
        3.5,
        1000,
    ),
    "v2, memory above": (
        {
            "proc/self/cgroup": V2,
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/memory.max": "5000",
        },
        None,
        5000,
    ),
    "v1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "4096",
        },
        0.5,
        4096,
    ),
    "v1, unlimited": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "9223372036854771712",
        },
        None,
        None,
    ),
    "v1, a container whose own path is not mounted": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/abc\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        },
        1.0,
        None,
    ),
    "nothing mounted": ({}, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_read_limits_returns_tightest_level(tmp_path: Path, name: str) -> None:
    files, cpus, memory = CASES[name]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text + "\n" if not text.endswith("\n") else text)
    assert read_limits(tmp_path) == (cpus, memory)
