"""Reads the network interfaces and RDMA adapters of this node, and what keeps a process from using the adapters."""

from __future__ import annotations

import os
from pathlib import Path

from msgspec import Struct

from entrypoint.machine.cpu_topology import read_number
from entrypoint.machine.procfs import read_lines

# Link layers as the kernel writes them (sysfs-class-infiniband).
KINDS = {"InfiniBand": "InfiniBand", "Ethernet": "RoCE"}


class Link(Struct, frozen=True):
    """A network interface; `speed_mbits` is None where the driver does not say it, as for a virtual one."""

    speed_mbits: int | None
    mtu: int


class RdmaAdapter(Struct, frozen=True):
    """An RDMA adapter: `kind` is InfiniBand, RoCE or EFA, `rate` is that of its first active port."""

    name: str
    kind: str
    active: bool
    rate: str


def read_link(root: Path, name: str) -> Link | None:
    """Return an interface by its name, None if the node has none of this name."""
    folder = root / "sys/class/net" / name
    if not name or "/" in name or not folder.exists():
        return None
    speed, mtu = (read_number(folder / file) or 0 for file in ("speed", "mtu"))
    return Link(speed if speed > 0 else None, mtu)


def read_adapters(root: Path) -> tuple[RdmaAdapter, ...]:
    """Return the RDMA adapters in the order of their names."""
    return tuple(read_adapter(folder) for folder in sorted((root / "sys/class/infiniband").glob("*")))


def read_adapter(folder: Path) -> RdmaAdapter:
    """Return one adapter."""
    ports = sorted((folder / "ports").glob("*"))
    active = [port for port in ports if "ACTIVE" in "".join(read_lines(port / "state"))]
    port = next(iter([*active, *ports]), folder)
    layer = "".join(read_lines(port / "link_layer"))
    is_efa = Path(os.path.realpath(folder / "device/driver")).name == "efa"
    kind = "EFA" if is_efa else KINDS.get(layer, layer or "unknown")
    return RdmaAdapter(folder.name, kind, bool(active), "".join(read_lines(port / "rate")).partition(" (")[0])


def uverbs_problem(root: Path) -> str:
    """Return why the device files of the adapters cannot be used, empty if they can."""
    files = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not files:
        return "no /dev/infiniband/uverbs* here; give the container the devices (--device=/dev/infiniband)"
    closed = [file for file in files if not os.access(file, os.R_OK | os.W_OK)]
    return f"{closed[0]} may not be opened by this user" if closed else ""
