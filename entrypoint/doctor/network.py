"""How data would travel between the nodes: the interface of Gloo, and RDMA or TCP for NCCL, with the reason.

Also what keeps a process from using the adapters.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec import Struct

from entrypoint.core.errors import printable
from entrypoint.core.network import interface_address, interface_for_route
from entrypoint.machine.container import memlock_bytes
from entrypoint.machine.cpu_topology import read_number
from entrypoint.machine.procfs import read_lines
from entrypoint.plan.preflight import MEMLOCK_BYTES, Check

# An address of the documentation range (RFC 5737): the kernel answers with the default route, and nothing is sent.
ELSEWHERE = "192.0.2.1"
# Libraries that carry NCCL's data: the verbs of InfiniBand and RoCE, and AWS's plugin for EFA.
VERBS, EFA_PLUGIN = "ibverbs", "nccl-net"

FindLibrary = Callable[[str], str | None]


def network_checks(
    root: Path, environ: Mapping[str, str], find_library: FindLibrary = ctypes.util.find_library
) -> Iterator[Check]:
    """Yield what the network of this node offers; `environ` is a rank's."""
    name, why = chosen_interface(environ)
    link = read_link(root, name)
    if name and not link:
        yield Check("interface", "warning", f"{why} is not on this node", "Set GLOO_SOCKET_IFNAME to one that is")
    elif link:
        speed = f"{link.speed_mbits / 1000:g} Gbit/s" if link.speed_mbits else "speed not known to its driver"
        yield Check("interface", "ok", f"{name} {interface_address(name)}, {speed}, MTU {link.mtu}, {why}")
    else:
        yield Check("interface", "warning", "none leads to other hosts", "Set GLOO_SOCKET_IFNAME to one")
    yield Check("Gloo", "ok", f"TCP over {name or 'the interface of the host name'}; it has no RDMA")
    adapters = read_adapters(root)
    for adapter in adapters:
        seen = f"{adapter.kind} {'active' if adapter.active else 'not active'}, {adapter.rate or 'rate unknown'}"
        yield Check(f"RDMA {adapter.name}", "ok" if adapter.active else "warning", seen)
    problem = rdma_problem(root, environ, adapters, find_library)
    if not problem:
        names = ", ".join(adapter.name for adapter in adapters if adapter.active)
        yield Check("NCCL", "ok", f"RDMA by {names}")
    else:
        seen = f"TCP over {name or 'an interface that it chooses'}: {problem}"
        yield Check("NCCL", "warning" if adapters else "ok", seen)


def chosen_interface(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the interface that Gloo takes, and why; empty if there is none."""
    if own := environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]:
        return own, f"GLOO_SOCKET_IFNAME={printable(own)}"
    return interface_for_route(ELSEWHERE), "the default route"


def rdma_problem(
    root: Path, environ: Mapping[str, str], adapters: tuple[RdmaAdapter, ...], find_library: FindLibrary
) -> str:
    """Return why NCCL does not use RDMA on this node, with what to do; empty if nothing here is against it."""
    active = [adapter for adapter in adapters if adapter.active]
    limit = memlock_bytes()
    only_some = "" if limit is None or limit >= MEMLOCK_BYTES else f"only {limit / 2**20:,.0f} MiB may be locked"
    only_efa = all(adapter.kind == "EFA" for adapter in active)
    library = EFA_PLUGIN if only_efa else VERBS
    package = "AWS's plugin aws-ofi-nccl" if only_efa else "the package libibverbs1 or rdma-core"
    reasons = (
        ("" if adapters else "no RDMA adapter in /sys/class/infiniband"),
        ("" if active else "no adapter has an active port; ask for the cable and the subnet manager"),
        ("NCCL_IB_DISABLE=1 is set" if environ.get("NCCL_IB_DISABLE") == "1" else ""),
        ("NCCL_NET=Socket is set" if environ.get("NCCL_NET", "").lower() == "socket" else ""),
        uverbs_problem(root),
        ("" if find_library(library) else f"lib{library}.so is not found; install {package}"),
        (f"{only_some}; set `ulimit -l unlimited`" if only_some else ""),
    )
    return next((reason for reason in reasons if reason), "")


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
