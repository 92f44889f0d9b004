"""CPUs by id with their physical core, socket and NUMA node, read from /sys and never from lscpu's text."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from msgspec import Struct


class Cpu(Struct, frozen=True):
    """One logical CPU.

    `core` is unique within its socket; `efficiency` marks the slower cores of a hybrid CPU. `cache` is the first CPU
    of those that share the last cache of this one, -1 where /sys does not show it.
    """

    id: int
    core: int
    socket: int
    node: int
    efficiency: bool = False
    cache: int = -1


class Topology(Struct, frozen=True):
    """The CPUs of the mask, how many the node has online, its NUMA nodes with memory, and what was assumptions."""

    cpus: tuple[Cpu, ...]
    online_cpus: int
    memory_nodes: tuple[int, ...]
    assumptions: tuple[str, ...]


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the ids of a kernel CPU list: `0-2,8` gives (0, 1, 2, 8); an empty one gives none."""
    ids: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            ids.extend(range(int(first), int(last or first) + 1))
    return tuple(ids)


def format_cpu_list(ids: tuple[int, ...]) -> str:
    """Return ids in the kernel's own form: (0, 1, 2, 8) gives `0-2,8`."""
    numbered = groupby(enumerate(sorted(ids)), key=lambda pair: pair[1] - pair[0])  # ids that follow each other
    runs = [[cpu for _, cpu in run] for _, run in numbered]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def read_cpu_list(path: Path) -> tuple[int, ...]:
    """Return the ids of a file with a kernel CPU list, none where it is hidden, empty or no list."""
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, ValueError):
        return ()


def read_number(path: Path) -> int | None:
    """Return a file's whole number, None where it is hidden or holds none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def read_topology(root: Path, mask: frozenset[int]) -> Topology:
    """Read the CPUs of the mask under `root`; what /sys hides (gVisor, some sandboxes) is assumptions and said.

    Siblings are those of core_cpus_list, whatever their numbering: core_id repeats in each cluster of some Arm
    systems. Source: kernel docs, admin-guide/cputopology.rst.
    """
    base = root / "sys/devices/system"
    online = read_cpu_list(base / "cpu/online") or tuple(sorted(mask))
    allowed = sorted(mask & frozenset(online)) or sorted(mask)
    cores, hidden = read_cores(base / "cpu", allowed)
    sockets = read_sockets(base / "cpu", allowed)
    nodes = {  # empty where the kernel has no NUMA or hides it
        cpu: int(path.parent.name.removeprefix("node"))
        for path in (base / "node").glob("node[0-9]*/cpulist")
        for cpu in read_cpu_list(path)
    }
    slow, caches = find_efficiency_cpus(root, allowed), read_caches(base / "cpu", allowed)
    assumptions: list[str] = []
    if hidden:
        assumptions.append(f"/sys hides the topology of CPUs {format_cpu_list(hidden)}: each counts as a physical core")
    if not nodes and len(set(sockets.values())) > 1:
        assumptions.append("/sys hides the NUMA nodes: each socket counts as one")
        nodes = sockets
    cpus = tuple(
        Cpu(
            id=cpu,
            core=cores[cpu],
            socket=sockets[cpu],
            node=nodes.get(cpu, 0),
            efficiency=cpu in slow,
            cache=caches.get(cpu, -1),
        )
        for cpu in allowed
    )
    return Topology(cpus, len(online), read_cpu_list(base / "node/has_memory"), tuple(assumptions))


def read_cores(folder: Path, allowed: list[int]) -> tuple[dict[int, int], tuple[int, ...]]:
    """Return CPU id → core id for the allowed CPUs, and those whose topology is hidden.

    A core's id is its first sibling's: one file lists all siblings of a core, so that 1,024 CPUs stay cheap.
    """
    cores: dict[int, int] = {}
    hidden: list[int] = []
    for cpu in allowed:
        if cpu in cores:
            continue
        topology = folder / f"cpu{cpu}/topology"
        siblings = read_cpu_list(topology / "core_cpus_list") or read_cpu_list(topology / "thread_siblings_list")
        core = min(siblings) if cpu in siblings else read_number(topology / "core_id")
        if core is None:
            hidden.append(cpu)
        cores |= dict.fromkeys(siblings if cpu in siblings else (cpu,), cpu if core is None else core)
    return cores, tuple(hidden)


def read_caches(folder: Path, allowed: list[int]) -> dict[int, int]:
    """Return CPU id → the first CPU that shares its L3 cache, as `shared_cpu_list` of /sys has it.

    A core complex of an EPYC has an L3 of its own, and so has a cluster of other CPUs. Source: kernel docs,
    ABI/testing/sysfs-devices-system-cpu.
    """
    caches: dict[int, int] = {}
    for cpu in allowed:
        if cpu not in caches:
            sharing = read_cpu_list(folder / f"cpu{cpu}/cache/index3/shared_cpu_list")
            caches |= dict.fromkeys(sharing, min(sharing)) if cpu in sharing else {}
    return caches


def read_sockets(folder: Path, allowed: list[int]) -> dict[int, int]:
    """Return CPU id → socket for the allowed CPUs; the kernel's -1 for unknown, and a hidden one, count as 0."""
    sockets: dict[int, int] = {}
    for cpu in allowed:
        if cpu not in sockets:
            topology = folder / f"cpu{cpu}/topology"
            socket = max(0, read_number(topology / "physical_package_id") or 0)
            sockets |= dict.fromkeys((cpu, *read_cpu_list(topology / "package_cpus_list")), socket)
    return sockets


# A core this much slower than the fastest is another kind; cores of one kind differ by a few percent.
EFFICIENCY_CAPACITY = 0.8


def find_efficiency_cpus(root: Path, allowed: list[int]) -> frozenset[int]:
    """Return the slower CPUs of a hybrid machine, none of a uniform one.

    Source: Intel's hybrid PMUs (/sys/devices/cpu_atom/cpus), Arm's cpu_capacity (kernel docs, sched-capacity.rst).
    """
    slow = {cpu for name in ("cpu_atom", "cpu_lowpower") for cpu in read_cpu_list(root / "sys/devices" / name / "cpus")}
    if slow:
        return frozenset(slow)
    folder = root / "sys/devices/system/cpu"
    if not allowed or not (folder / f"cpu{allowed[0]}/cpu_capacity").exists():
        return frozenset()
    capacity = {cpu: read_number(folder / f"cpu{cpu}/cpu_capacity") or 0 for cpu in allowed}
    return frozenset(cpu for cpu in allowed if capacity[cpu] < EFFICIENCY_CAPACITY * max(capacity.values()))
