"""What this process may really use: the values that the plan is made from."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from entrypoint.cgroup import read_limits
from entrypoint.gpus import Gpu, read_gpus
from entrypoint.libraries import Library, read_libraries
from entrypoint.topology import Cpu, read_cpus


@dataclass(frozen=True)
class Machine:
    """One node as this process may use it: `cpus` are those of the affinity mask, in order of their ids."""

    hostname: str
    cpu_model: str
    cpu_vendor: str
    cpus: tuple[Cpu, ...]
    online_cpus: int
    quota_cpus: float | None
    memory_bytes: int
    shm_bytes: int
    gpus: tuple[Gpu, ...] = ()
    libraries: tuple[Library, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def physical_cores(self) -> tuple[Cpu, ...]:
        """The first allowed CPU of each allowed physical core, in order of socket, NUMA node and core."""
        first: dict[tuple[int, int], Cpu] = {}
        for cpu in self.cpus:
            first.setdefault((cpu.socket, cpu.core), cpu)
        return tuple(sorted(first.values(), key=lambda cpu: (cpu.socket, cpu.node, cpu.core, cpu.id)))

    @property
    def budget_cores(self) -> int:
        """How many threads may run at once without waiting: physical cores, capped by the quota, at least 1."""
        cores = len(self.physical_cores)
        return cores if self.quota_cpus is None else max(1, min(cores, int(self.quota_cpus)))

    def library(self, name: str) -> Library:
        """Return what was found of a library of `entrypoint.libraries.PATTERNS`."""
        return next((one for one in self.libraries if one.name == name), Library(name, None, "not looked for"))


def read_machine(root: Path = Path("/"), affinity: frozenset[int] | None = None) -> Machine:
    """Read the node under `root`, which a test may point at a built tree; decides nothing.

    `affinity` are the allowed CPU ids, by default those of this process. Under another root only what lies
    in that tree is read, so NVML is not asked, and a virtual environment is looked for at its own path there.
    """
    mask = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    cpus, online, assumed = read_cpus(root, mask)
    limits = read_limits(root)
    prefix = root / Path(sys.prefix).relative_to("/")
    total = meminfo_bytes(root)
    return Machine(
        hostname=platform.node(),
        cpu_model=cpu_word(root, "model name") or platform.machine(),
        cpu_vendor=cpu_word(root, "vendor_id"),
        cpus=cpus,
        online_cpus=online,
        quota_cpus=limits.cpus,
        memory_bytes=min(total, limits.memory_bytes) if limits.memory_bytes else total,
        shm_bytes=shm_bytes(root),
        gpus=read_gpus(root),
        libraries=read_libraries(root, prefix),
        assumed=assumed,
    )


def cpu_word(root: Path, key: str) -> str:
    """Return what /proc/cpuinfo says of the first CPU under a key; nothing where it has none, as on Arm."""
    for line in read_lines(root / "proc/cpuinfo"):
        if line.startswith(key):
            return line.split(":", 1)[1].strip()
    return ""


def meminfo_bytes(root: Path) -> int:
    """Return the node's memory in bytes, 0 where /proc is hidden."""
    for line in read_lines(root / "proc/meminfo"):
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return 0


def shm_bytes(root: Path) -> int:
    """Return the size of /dev/shm in bytes, 0 where there is none."""
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError:
        return 0
    return stat.f_blocks * stat.f_frsize


def read_lines(path: Path) -> list[str]:
    """Return a file's lines, none where it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []
