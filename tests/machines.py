"""Machines that are not here, built as the trees of /sys and /proc that their kernels show, and their NVML answers.

Shapes and numberings are those of lscpu and `nvidia-smi topo -m` on such machines; each is named for what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from entrypoint.machine.cpu_topology import format_cpu_list


@dataclass
class Core:
    """A physical core to build: its siblings' CPU ids, socket, NUMA node, the kernel's core_id, and its L3's number."""

    cpus: tuple[int, ...]
    socket: int = 0
    node: int = 0
    core_id: int = 0
    cache: int | None = None


@dataclass
class Tree:
    """A machine to build under a root folder."""

    cores: list[Core]
    offline: tuple[int, ...] = ()
    memory_nodes: tuple[int, ...] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    memory_kib: int = 8 << 20

    @property
    def cpus(self) -> frozenset[int]:
        """All online CPUs."""
        return frozenset(cpu for core in self.cores for cpu in core.cpus) - frozenset(self.offline)

    def build(self, root: Path) -> Path:
        """Write the tree and return its root."""
        system = root / "sys/devices/system"
        sockets: dict[int, list[int]] = {}
        nodes: dict[int, list[int]] = {}
        caches: dict[int | None, list[int]] = {}
        for core in self.cores:
            online = [cpu for cpu in core.cpus if cpu not in self.offline]
            caches.setdefault(core.cache, []).extend(online)
            sockets.setdefault(core.socket, []).extend(online)
            nodes.setdefault(core.node, []).extend(online)
        for core in self.cores:
            siblings = tuple(cpu for cpu in core.cpus if cpu not in self.offline)
            for cpu in siblings:
                write(system / f"cpu/cpu{cpu}/topology", {
                    "core_id": core.core_id,
                    "physical_package_id": core.socket,
                    "core_cpus_list": format_cpu_list(siblings),
                    "thread_siblings_list": format_cpu_list(siblings),
                    "package_cpus_list": format_cpu_list(tuple(sockets[core.socket])),
                })  # fmt: skip
                if core.cache is not None:
                    shared = {"shared_cpu_list": format_cpu_list(tuple(caches[core.cache]))}
                    write(system / f"cpu/cpu{cpu}/cache/index3", shared)
        with_memory = tuple(nodes) if self.memory_nodes is None else self.memory_nodes
        for node in {*nodes, *with_memory}:
            write(system / f"node/node{node}", {"cpulist": format_cpu_list(tuple(nodes.get(node, ())))})
        write(system / "node", {"has_memory": format_cpu_list(with_memory)})
        write(system / "cpu", {"online": format_cpu_list(tuple(self.cpus))})
        write(root, {"proc/meminfo": f"MemTotal: {self.memory_kib} kB", **self.files})
        return root


def write(folder: Path, files: Mapping[str, object]) -> None:
    """Write small files as the kernel shows them, with a newline."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


def smp(
    sockets: int,
    cores_per_socket: int,
    threads_per_core: int = 1,
    nodes_per_socket: int = 1,
    *,
    interleaved: bool = True,
    cores_per_cache: int = 0,
    **more: Any,
) -> Tree:
    """Build a symmetric machine: siblings numbered interleaved (0 and n) or adjacent (0 and 1).

    `cores_per_cache` cores share an L3 cache; 0 shows none.
    """
    total = sockets * cores_per_socket
    cores = []
    for core in range(total):
        socket, core_id = divmod(core, cores_per_socket)
        cpus = tuple(
            core + thread * total if interleaved else core * threads_per_core + thread
            for thread in range(threads_per_core)
        )
        node = socket * nodes_per_socket + core_id * nodes_per_socket // cores_per_socket
        cores.append(Core(cpus, socket, node, core_id, core // cores_per_cache if cores_per_cache else None))
    return Tree(cores, **more)


def hybrid_laptop() -> Tree:
    """A Core i7-1370P: 6 performance cores with siblings 0-11, 8 efficiency cores 12-19, as Intel's PMUs tell."""
    fast = [Core((2 * core, 2 * core + 1), core_id=4 * core) for core in range(6)]
    slow = [Core((12 + core,), core_id=24 + core) for core in range(8)]
    return Tree(fast + slow, files={"sys/devices/cpu_core/cpus": "0-11", "sys/devices/cpu_atom/cpus": "12-19"})


def desktop() -> Tree:
    """A Core i9-14900K: 8 performance cores with siblings 0-15, 16 efficiency cores 16-31, one L3 cache."""
    fast = [Core((2 * core, 2 * core + 1), core_id=4 * core, cache=0) for core in range(8)]
    slow = [Core((16 + core,), core_id=32 + core, cache=0) for core in range(16)]
    return Tree(fast + slow, files={"sys/devices/cpu_core/cpus": "0-15", "sys/devices/cpu_atom/cpus": "16-31"})


def big_little() -> Tree:
    """An Arm board: 4 cores of capacity 1024 and 4 of 446, whose core_id repeats in each cluster."""
    cores = [Core((cpu,), core_id=cpu % 4) for cpu in range(8)]
    capacity = {f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity": "446" if cpu < 4 else "1024" for cpu in range(8)}
    return Tree(cores, files=capacity)


def kubernetes_pod() -> Tree:
    """A pod limited to 3.5 CPUs on a 2-socket node of 32 cores: cgroup v2, seen from inside its own namespace."""
    quota = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "350000 100000", "sys/fs/cgroup/memory.max": 8 << 30}
    return smp(2, 16, 2, files={name: str(text) for name, text in quota.items()})


def gaps() -> Tree:
    """A POWER9 with GPUs' memory as nodes: CPU nodes 0 and 8, memory-only nodes 252 to 255, a node without memory."""
    cores = [Core(tuple(range(4 * core, 4 * core + 4)), core // 8, 8 * (core // 8), core) for core in range(16)]
    return Tree(cores, memory_nodes=(0, 252, 253, 254, 255))


MACHINES: Mapping[str, Callable[[], Tree]] = {
    "VM of 1 CPU": lambda: smp(1, 1),
    "VM of 2 CPUs": lambda: smp(1, 2),
    "hybrid laptop": hybrid_laptop,
    "Arm big.LITTLE": big_little,
    "2-socket Xeon, siblings adjacent": lambda: smp(2, 28, 2, interleaved=False),
    "2-socket Xeon, siblings interleaved": lambda: smp(2, 28, 2),
    "2-socket Xeon, SNC-4": lambda: smp(2, 56, 2, 4),
    "2-socket EPYC, NPS4": lambda: smp(2, 64, 2, 4),
    # lscpu and hwloc of these: an L3 for 4 cores (Zen 2), 8 cores (Zen 4), a sub-NUMA cluster, a socket.
    "2-socket EPYC 7742": lambda: smp(2, 64, 2, cores_per_cache=4),
    "2-socket EPYC 9654": lambda: smp(2, 96, 2, cores_per_cache=8),
    "2-socket Xeon 8480+, SNC-4": lambda: smp(2, 56, 2, 4, cores_per_cache=14),
    "2-socket Xeon 6780E": lambda: smp(2, 144, cores_per_cache=144),
    "Graviton 4": lambda: smp(1, 96, cores_per_cache=96),
    "Grace": lambda: smp(1, 72, cores_per_cache=72),
    "desktop with P- and E-cores": desktop,
    "2-socket Arm without SMT": lambda: smp(2, 64),
    "8-GPU NVLink node": lambda: smp(2, 20, 2, files=gpu_nodes(NVLINK_NODES)),
    "8-GPU NVSwitch node": lambda: smp(2, 56, 2, files=gpu_nodes(NVLINK_NODES)),
    "Kubernetes pod with quota 3.5": kubernetes_pod,
    "Slurm step with a cpuset": lambda: smp(2, 16, 2),
    "1,024 CPUs": lambda: smp(4, 128, 2, 2),
    "nodes with gaps": gaps,
    "offline siblings": lambda: smp(1, 8, 2, offline=tuple(range(8, 16))),
}
# Where the process may run only on a part of the machine.
MASKS: Mapping[str, frozenset[int]] = {"Slurm step with a cpuset": frozenset({4, 5, 6, 7, 36, 37, 38, 39})}

# The book's table 10.1, `nvidia-smi topo -m` of an 8-GPU node with NVLink (a DGX-1's hybrid cube mesh), and the
# NUMA node of each GPU.
TABLE_10_1 = """
X   NV1 NV1 NV2 NV2 SYS SYS SYS
NV1 X   NV2 NV1 SYS NV2 SYS SYS
NV1 NV2 X   NV2 SYS SYS NV1 SYS
NV2 NV1 NV2 X   SYS SYS SYS NV1
NV2 SYS SYS SYS X   NV1 NV1 NV2
SYS NV2 SYS SYS NV1 X   NV2 NV1
SYS SYS NV1 SYS NV1 NV2 X   NV2
SYS SYS SYS NV1 NV2 NV1 NV2 X
"""
LINKS_10_1 = tuple(tuple(line.split()) for line in TABLE_10_1.strip().splitlines())
NVLINK_NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def gpu_address(index: int) -> str:
    """Return the PCI address of a built GPU as /sys spells it."""
    return f"0000:{0x10 + index:02x}:00.0"


def gpu_nodes(nodes: tuple[int, ...]) -> dict[str, str]:
    """Return the files that tell each GPU's NUMA node, and that there is a driver."""
    files = {f"sys/bus/pci/devices/{gpu_address(index)}/numa_node": str(node) for index, node in enumerate(nodes)}
    return files | {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"}


class NVMLError(Exception):
    """As pynvml's."""


ANCESTORS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}


class RecordedNvml:
    """Answers as pynvml would on a node with these links; `NV#` is that many NVLinks, over a switch or direct."""

    NVMLError = NVMLError
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU = 0
    NVML_NVLINK_DEVICE_TYPE_SWITCH = 2

    def __init__(
        self,
        links: tuple[tuple[str, ...], ...],
        *,
        switched: int = 0,
        migs: Mapping[int, int] | None = None,
        name: str = "Tesla V100-SXM2-32GB",
        cuda: int = 13000,
        problem: str = "",
    ) -> None:
        self.links, self.switched, self.migs = links, switched, dict(migs or {})
        self.name, self.cuda, self.problem = name, cuda, problem

    def nvmlInit(self) -> None:  # noqa: N802
        if self.problem:
            raise NVMLError(self.problem)

    def nvmlShutdown(self) -> None:  # noqa: N802
        pass

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion(self) -> int:  # noqa: N802
        return self.cuda

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.links)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:  # noqa: N802
        return (index, None)

    def nvmlDeviceGetName(self, handle: Any) -> str:  # noqa: N802
        return self.name if handle[1] is None else f"{self.name} MIG 1g.10gb"

    def nvmlDeviceGetUUID(self, handle: Any) -> str:  # noqa: N802
        index, mig = handle
        return f"GPU-{index:08x}" if mig is None else f"MIG-{index:08x}-{mig}"

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(total=32 << 30 if handle[1] is None else 10 << 30)

    def nvmlDeviceGetCudaComputeCapability(self, _: Any) -> tuple[int, int]:  # noqa: N802
        return (9, 0) if "H100" in self.name else (7, 0)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000{gpu_address(handle[0]).upper()}")

    def nvmlDeviceGetMigMode(self, handle: Any) -> tuple[int, int]:  # noqa: N802
        return (1, 1) if handle[0] in self.migs else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, _: Any) -> int:  # noqa: N802
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:  # noqa: N802
        if index >= self.migs.get(handle[0], 0):
            raise NVMLError("Not Found")
        return (handle[0], index)

    def ends(self, handle: Any) -> list[int]:
        """Return the other end of each NVLink of a GPU, -1 for a switch."""
        if self.switched:
            return [-1] * self.switched
        row = self.links[handle[0]]
        return [peer for peer, link in enumerate(row) if link.startswith("NV") for _ in range(int(link[2:]))]

    def end(self, handle: Any, link: int) -> int:
        if link >= len(self.ends(handle)):
            raise NVMLError("Invalid Argument")
        return self.ends(handle)[link]

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: int) -> int:  # noqa: N802
        return int(self.end(handle, link) is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: int) -> int:  # noqa: N802
        return 2 if self.end(handle, link) < 0 else 0

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: Any, link: int) -> Any:  # noqa: N802
        return SimpleNamespace(busId=f"0000{gpu_address(self.end(handle, link)).upper()}")

    def nvmlDeviceGetTopologyCommonAncestor(self, a: Any, b: Any) -> int:  # noqa: N802
        return ANCESTORS[self.links[a[0]][b[0]]]


def nvlink_node() -> RecordedNvml:
    """The 8 GPUs of table 10.1."""
    return RecordedNvml(LINKS_10_1)


def nvswitch_node() -> RecordedNvml:
    """8 H100s with 18 links each to the switches."""
    links = tuple(tuple("X" if a == b else "NODE" if a // 4 == b // 4 else "SYS" for b in range(8)) for a in range(8))
    return RecordedNvml(links, switched=18, name="NVIDIA H100 80GB HBM3")


def write_adapter(root: Path, name: str, layer: str, *, state: str = "4: ACTIVE", driver: str = "mlx5_core") -> None:
    """Write an RDMA adapter with one port, and its device file, below the root folder of a machine."""
    port = root / f"sys/class/infiniband/{name}/ports/1"
    drivers = root / f"sys/bus/pci/drivers/{driver}"
    for folder in (port, drivers, port.parents[1] / "device", root / "dev/infiniband"):
        folder.mkdir(parents=True, exist_ok=True)
    (port.parents[1] / "device/driver").symlink_to(drivers)
    for file, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
        (port / file).write_text(f"{text}\n")
    (root / "dev/infiniband" / f"uverbs_{name}").touch()
