"""Program of `entrypoint doctor --network`: measures an all-reduce between the nodes, in one rank of each node.

It also says how data would travel between them: the interface of Gloo, and RDMA or TCP for NCCL, with what keeps a
process from using the adapters. On one node that is all.
"""

from __future__ import annotations

import ctypes.util
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec import Struct
from msgspec.structs import asdict

from entrypoint.core.console import STDOUT, redirected, report_error
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.network import interface_address, interface_for_route
from entrypoint.doctor.report import format_report
from entrypoint.machine.container import memlock_bytes
from entrypoint.machine.cpu_topology import read_number
from entrypoint.machine.procfs import ROOT, read_lines
from entrypoint.plan.model import PLAN_VAR, Plan
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


LIMIT_S = 120
# The longest report of a rank.
MAX_REPORT_BYTES = 65536
SMALL, LARGE_BYTES = 1, 64 << 20
SMALL_REPEATS, LARGE_REPEATS = 100, 5
# Less than this share of the link's speed is a warning.
LOW_SHARE = 0.5


def main(argv: Sequence[str]) -> int:
    """Measure with the other nodes, and return the exit code; a lost rank is one line."""
    try:
        # Gloo in torch 2.8 prints a line for each connection.
        with Path(os.devnull).open("wb") as nowhere, redirected(STDOUT, nowhere.fileno()):
            checks = run()
        if checks:
            print(format_report(checks, as_json="--json" in argv), flush=True)
    except RuntimeError as error:
        line = f"--network: the ranks could not exchange data ({printable(first_line(error))}). See the checks of"
        return report_error(UserError(f"{line} `entrypoint doctor` on each node.", ExitCode.RANK_FAILED))
    return ExitCode.DONE


def run() -> list[Check]:
    """Measure, and return on rank 0 what was found on each node, nothing on the others; raises RuntimeError."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    found = describe_node() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    if world_size == 1:
        return summarize([found], None, "")
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    reports = gather_reports(found, world_size)
    first_ranks = [number for number, report in enumerate(reports) if report]
    text = os.environ.get(PLAN_VAR)
    backend = "nccl" if text and Plan.from_json(text).backend == "nccl" else "gloo"  # as the plan of these ranks
    speed = None
    if len(first_ranks) > 1:
        group = dist.new_group(first_ranks, backend=backend)
        speed = measure(group, len(first_ranks), backend) if rank in first_ranks else None
    dist.barrier()
    dist.destroy_process_group()
    return [] if rank else summarize(reports, speed, backend)


def gather_reports(report: dict[str, Any] | None, world_size: int) -> list[Any]:
    """Return every rank's report, as JSON of limited length: what another rank sends can run no code."""
    text = json.dumps(report).encode()
    sent = torch.frombuffer(bytearray(text.ljust(MAX_REPORT_BYTES)), dtype=torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(parts, sent)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def describe_node() -> dict[str, Any]:
    """Return the checks of this node, each with the node's name, and the speed of its link in Mbit/s."""
    node = socket.gethostname()
    environ = dict(os.environ)
    if environ.get("LOCAL_WORLD_SIZE") == environ.get("WORLD_SIZE"):
        environ.pop("GLOO_SOCKET_IFNAME", None)  # all ranks are on this node, so the plan chose loopback
    checks = [asdict(check) for check in network_checks(ROOT, environ)]
    link = read_link(ROOT, chosen_interface(environ)[0])
    return {
        "node": node,
        "checks": [{**check, "what": f"{node} {check['what']}"} for check in checks],
        "mbits": link.speed_mbits if link else None,
    }


def measure(group: Any, size: int, backend: str) -> tuple[float, float]:
    """Return the median time of a small all-reduce (s), and what a large one moves by each rank's link (Gbit/s)."""
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if backend == "nccl" else torch.device("cpu")
    small, large = torch.ones(SMALL, device=device), torch.ones(LARGE_BYTES // 4, device=device)
    latency_s = repeat(small, group, SMALL_REPEATS)
    large_s = repeat(large, group, LARGE_REPEATS)
    # Each rank sends this share of the values, and receives as many, in a ring (NCCL tests: bus bandwidth).
    moved = LARGE_BYTES * 2 * (size - 1) / size
    return latency_s, 8 * moved / large_s / 1e9


def repeat(values: torch.Tensor, group: Any, times: int) -> float:
    """Return the median time of an all-reduce in seconds; the first one connects, and does not count."""
    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        dist.all_reduce(values, group=group)
        values.sum().item()  # waits for a GPU
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def summarize(reports: Sequence[Any], speed: tuple[float, float] | None, backend: str) -> list[Check]:
    """Return the checks of all nodes, and what was measured, compared with the slowest link of the nodes."""
    nodes = [report for report in reports if report]
    checks = [Check(**check) for report in nodes for check in report["checks"]]
    if not speed:
        return [*checks, Check("all-reduce", "ok", "not measured: on one node nothing leaves it")]
    latency_s, gbits = speed
    seen = f"{len(nodes)} nodes by {backend}, {1e6 * latency_s:,.0f} µs for a number, {gbits:.2f} Gbit/s for 64 MiB"
    link = min(report["mbits"] or 0 for report in nodes) / 1000  # 0 if one is not known
    share = gbits / link if link else 1.0
    known = (
        f", {100 * share:.0f} % of the slowest link ({link:g} Gbit/s)" if link else "; the speed of a link is not known"
    )
    advice = "look at the interfaces above, and for other traffic" if share < LOW_SHARE else ""
    return [*checks, Check("all-reduce", "warning" if advice else "ok", f"{seen}{known}", advice)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
