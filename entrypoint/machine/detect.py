"""Detect the hardware and software of this node that this process may use."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from entrypoint.core.errors import count_text
from entrypoint.machine.backends import OneCcl, find_oneccl
from entrypoint.machine.cgroup import read_limits
from entrypoint.machine.container import ContainerInfo, detect_container
from entrypoint.machine.cpu_topology import Cpu, read_topology
from entrypoint.machine.gpus import Driver, Gpu, read_gpus
from entrypoint.machine.interpreter import Packages, read_packages
from entrypoint.machine.procfs import read_lines
from entrypoint.machine.shared_libraries import Library, read_libraries

# The CPU flags that select the data type and IPEX: vector, matrix and bfloat16 units of x86 and Arm.
FLAGS = frozenset({"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16", "bf16", "sve"})


class Machine(Struct, frozen=True):
    """One node as this process may use it: `cpus` are those of the affinity mask, in order of their ids.

    `cpu_flags` are the supported ones of `FLAGS`. `memory_nodes` are the NUMA nodes with memory. `launcher_affinity`
    are the CPUs of the launcher's default binding. `busy_cpus` is the number of CPUs that other processes
    keep busy. `interfaces` are the network's, none where the kernel does not list them here.
    """

    hostname: str
    cpu_model: str
    cpu_vendor: str
    cpus: tuple[Cpu, ...]
    online_cpus: int
    quota_cpus: float | None
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    libraries: tuple[Library, ...] = ()
    assumptions: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()
    memory_nodes: tuple[int, ...] = ()
    driver: Driver = field(default_factory=Driver)
    packages: Packages = field(default_factory=Packages)
    oneccl: OneCcl = field(default_factory=OneCcl)
    container: ContainerInfo = field(default_factory=ContainerInfo)
    launcher_affinity: tuple[int, ...] = ()
    busy_cpus: float = 0.0
    interfaces: tuple[str, ...] = ()

    def library(self, name: str) -> Library:
        """Return a library of `entrypoint.machine.shared_libraries.LIBRARY_PATTERNS`."""
        return next((one for one in self.libraries if one.name == name), Library(name, None, "not looked for"))


def detect_machine(
    root: Path = Path("/"),
    affinity: frozenset[int] | None = None,
    nvml: Any = None,
    environment: Path = Path(sys.prefix),
) -> Machine:
    """Read the node under `root`, which tests may point at a simulated tree.

    `affinity` are the allowed CPU ids, by default those of this process. `environment` is the program's, and is looked
    for at its own path under another root. `nvml` may be a recording that provides the GPUs.
    """
    mask = frozenset(os.sched_getaffinity(0)) if affinity is None else affinity
    topology = read_topology(root, mask)
    quota_cpus, limit_bytes = read_limits(root)
    gpus, driver = read_gpus(root, nvml=nvml)
    prefix = root / environment.relative_to("/")
    cpu = read_cpuinfo(root)
    flags = cpu.get("flags", cpu.get("Features", "")).split()
    lines = (line.split() for line in read_lines(root / "proc/meminfo"))
    total = next((int(words[1]) * 1024 for words in lines if words[0] == "MemTotal:"), 0)
    return Machine(
        hostname=platform.node(),
        cpu_model=cpu.get("model name") or platform.machine(),
        cpu_vendor=cpu.get("vendor_id", ""),
        cpus=topology.cpus,
        online_cpus=topology.online_cpus,
        quota_cpus=quota_cpus,
        memory_bytes=min(total, limit_bytes) if limit_bytes else total,
        gpus=gpus,
        libraries=read_libraries(root, prefix),
        assumptions=topology.assumptions,
        cpu_flags=tuple(sorted(FLAGS.intersection(flags))),
        memory_nodes=topology.memory_nodes,
        driver=driver,
        packages=read_packages(prefix),
        oneccl=find_oneccl(prefix),
        container=detect_container(root),
        interfaces=tuple(sorted(path.name for path in root.glob("sys/class/net/*"))),
    )


def read_cpuinfo(root: Path) -> dict[str, str]:
    """Return what /proc/cpuinfo says of the first CPU; of 1,024 the whole file would take long."""
    words: dict[str, str] = {}
    with suppress(OSError), (root / "proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            if not line.strip():
                break
            key, _, value = line.partition(":")
            words[key.strip()] = value.strip()
    return words


def describe_machine(machine: Machine) -> str:
    """Return the machine in one line."""
    gpus = f"{len(machine.gpus)} x {machine.gpus[0].name}" if machine.gpus else "no GPU"
    memory = f"{machine.memory_bytes / 2**30:.1f} GiB" if machine.memory_bytes else "memory unknown"
    cores = len({(cpu.socket, cpu.core) for cpu in machine.cpus})
    nodes = len({(cpu.socket, cpu.node) for cpu in machine.cpus})
    numa = f", {nodes} NUMA nodes" if nodes > 1 else ""
    return (
        f"{machine.hostname}: {machine.cpu_model}, {len(machine.cpus)} of {machine.online_cpus} CPUs"
        f" ({count_text(cores, 'physical core')}{numa}), {memory}, {gpus}"
    )
