"""Limits of built cgroup trees, v1 and v2, and ranks that the kernel kills for want of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from entrypoint.machine.cgroup import MemoryEvents, oom_message, read_limits, read_memory
from tests.conftest import PYTHON, Entrypoint, needs_two_cores, script

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


GIB = 1 << 30
MEMORY_V2 = {
    "proc/self/cgroup": "0::/job/step\n",
    "sys/fs/cgroup/job/step/memory.events": "low 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n",
    "sys/fs/cgroup/job/step/memory.max": "max\n",
    "sys/fs/cgroup/job/memory.max": str(2 * GIB),
    "sys/fs/cgroup/job/memory.peak": str(2 * GIB),
    "sys/fs/cgroup/job/memory.events": "oom_kill 3\n",
    "sys/fs/cgroup/memory.events": "oom_kill 99\n",
}
MEMORY_V1 = {
    "proc/self/cgroup": "4:memory:/job\n",
    "sys/fs/cgroup/memory/job/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(GIB),
    "sys/fs/cgroup/memory/job/memory.max_usage_in_bytes": str(GIB),
}


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        (MEMORY_V2, MemoryEvents(3, 2 * GIB, 2 * GIB)),
        (MEMORY_V1, MemoryEvents(2, GIB, GIB)),
        # A group that has not killed yet counts like one that has: else two counters would be compared.
        (
            {
                "proc/self/cgroup": "0::/job\n",
                "sys/fs/cgroup/job/memory.events": "oom_kill 0\n",
                "proc/vmstat": "oom_kill 4\n",
            },
            MemoryEvents(0),
        ),
        ({"proc/self/cgroup": "0::/\n", "proc/vmstat": "nr_free 5\noom_kill 4\n"}, MemoryEvents(4)),
        ({}, MemoryEvents()),
    ],
)
def test_read_memory_uses_limited_cgroup(tmp_path: Path, files: dict[str, str], seen: MemoryEvents) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert read_memory(tmp_path) == seen


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (MemoryEvents(3), MemoryEvents(3), ""),
        (MemoryEvents(3, GIB, GIB), MemoryEvents(4, GIB, GIB), "out of memory, the 1.0 GiB that this job may use (peak"
                                                               " 1.0 GiB)"),
        (MemoryEvents(3), MemoryEvents(4), "out of memory, the machine's; lower the batch size or the number"),
    ],
)  # fmt: skip
def test_oom_message_names_the_limit(before: MemoryEvents, after: MemoryEvents, said: str) -> None:
    reported = oom_message(before, after)
    assert reported.startswith(said)
    assert bool(reported) is bool(said)


HOG = """
    import os, time
    if os.environ["RANK"] == "1":
        kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
    time.sleep(60)
"""


@pytest.mark.launch
@needs_two_cores
def test_oom_killed_rank_is_reported_with_its_limit(entrypoint: Entrypoint, limited: tuple[str, ...]) -> None:
    hog = script(entrypoint.folder, "hog.py", HOG)
    command = (*limited, PYTHON, "-m", "entrypoint", "run", "--nproc-per-node=2", str(hog))
    line = entrypoint.error_line(command=command, env={"LAUNCH_QUIET": "1"}, code=5)
    assert "rank 1 of this job" in line
    assert "failed first: killed by SIGKILL: out of memory, the 1.5 GiB that this job may use (peak 1.5 GiB)" in line
