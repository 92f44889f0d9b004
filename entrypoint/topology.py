"""CPUs by id with their physical core, socket and NUMA node, read from /sys and never from lscpu's text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cpu:
    """One logical CPU. `core` is unique within its socket, as the kernel's core_id is."""

    id: int
    core: int
    socket: int
    node: int


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
    parts: list[str] = []
    run: list[int] = []
    for cpu in [*sorted(ids), None]:
        if run and cpu != run[-1] + 1:
            parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
            run = []
        if cpu is not None:
            run.append(cpu)
    return ",".join(parts)


def read_cpus(root: Path, mask: frozenset[int]) -> tuple[tuple[Cpu, ...], int, tuple[str, ...]]:
    """Return the CPUs of the mask, how many the node has online, and what had to be assumed.

    Where /sys hides the topology (gVisor, some sandboxes) each CPU counts as a core of its own on socket 0.
    """
    base = root / "sys/devices/system"
    nodes = numa_nodes(base / "node")
    online_file = base / "cpu/online"
    online = parse_cpu_list(online_file.read_text()) if online_file.is_file() else tuple(sorted(mask))
    cpus: list[Cpu] = []
    blind: list[int] = []
    for cpu in sorted(mask & frozenset(online)) or sorted(mask):
        topology = base / f"cpu/cpu{cpu}/topology"
        try:
            core = int((topology / "core_id").read_text())
            socket = max(0, int((topology / "physical_package_id").read_text()))
        except (OSError, ValueError):
            blind.append(cpu)
            core, socket = cpu, 0
        cpus.append(Cpu(cpu, core, socket, nodes.get(cpu, 0)))
    assumed = (
        (f"/sys hides the topology of CPUs {format_cpu_list(tuple(blind))}: each counts as a physical core",)
        if blind
        else ()
    )
    return tuple(cpus), len(online), assumed


def numa_nodes(folder: Path) -> dict[int, int]:
    """Return CPU id → NUMA node id for the nodes that have CPUs; empty where the kernel has no NUMA."""
    return {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in folder.glob("node[0-9]*/cpulist")
        for cpu in parse_cpu_list(path.read_text())
    }
