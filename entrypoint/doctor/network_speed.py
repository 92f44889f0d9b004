"""Program of `entrypoint doctor --network`: measures an all-reduce between the nodes, in one rank of each node.

A rank that is alone starts a second process, and the two measure loopback.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import asdict

from entrypoint.core.console import STDOUT, redirected, report_error
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from entrypoint.core.network import hold_port
from entrypoint.core.process import module_command
from entrypoint.doctor.network import chosen_interface, network_checks, read_link
from entrypoint.doctor.report import format_report
from entrypoint.machine.procfs import ROOT
from entrypoint.plan.model import PLAN_VAR, Plan
from entrypoint.plan.preflight import Check

LIMIT_S = 120
# The longest report of a rank.
MAX_REPORT_BYTES = 65536
SMALL, LARGE_BYTES = 1, 64 << 20
SMALL_REPEATS, LARGE_REPEATS = 100, 5
# Less than this share of the link's speed is a warning.
LOW_SHARE = 0.5


def main(argv: Sequence[str]) -> int:
    """Measure with the other ranks, and return the exit code; a lost rank is one line."""
    partner = start_partner() if int(os.environ.get("WORLD_SIZE", "1")) == 1 else None
    try:
        # Gloo in torch 2.8 prints a line for each connection.
        with Path(os.devnull).open("wb") as nowhere, redirected(STDOUT, nowhere.fileno()):
            checks = run()
        if checks:
            print(format_report(checks, as_json="--json" in argv), flush=True)
        return partner.wait(LIMIT_S) if partner else ExitCode.DONE
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        line = f"--network: the ranks could not exchange data ({printable(first_line(error))}). See the checks of"
        return report_error(UserError(f"{line} `entrypoint doctor` on each node.", ExitCode.RANK_FAILED))
    finally:
        if partner:
            partner.kill()


def run() -> list[Check]:
    """Measure, and return on rank 0 what was found on each node, nothing on the others; raises RuntimeError."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_S))
    found = describe_node() if os.environ.get("LOCAL_RANK", "0") == "0" else None
    reports = gather_reports(found, world_size)
    first_ranks = [number for number, report in enumerate(reports) if report]
    measured = first_ranks if len(first_ranks) > 1 else list(range(world_size))
    text = os.environ.get(PLAN_VAR) if len(first_ranks) > 1 else None
    backend = "nccl" if text and Plan.from_json(text).backend == "nccl" else "gloo"  # as the plan of these ranks
    group = dist.new_group(measured, backend=backend)
    speed = measure(group, len(measured), backend) if rank in measured else None
    dist.barrier()
    dist.destroy_process_group()
    nodes = [report for report in reports if report]
    if rank or not speed:
        return []
    checks = [Check(**check) for report in nodes for check in report["checks"]]
    return [*checks, judge(speed, backend, nodes, len(measured))]


def gather_reports(report: dict[str, Any] | None, world_size: int) -> list[Any]:
    """Return every rank's report, as JSON of limited length: what another rank sends can run no code."""
    text = json.dumps(report).encode()
    sent = torch.frombuffer(bytearray(text.ljust(MAX_REPORT_BYTES)), dtype=torch.uint8)
    parts = [torch.empty_like(sent) for _ in range(world_size)]
    dist.all_gather(parts, sent)
    return [json.loads(part.numpy().tobytes()) for part in parts]


def start_partner() -> subprocess.Popen[bytes]:
    """Start a second process for a rank that is alone, and prepare both to meet."""
    with hold_port() as held:
        port = held.getsockname()[1]
    meeting = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    os.environ.update({**meeting, "RANK": "0", "LOCAL_RANK": "0"})
    environ = {**os.environ, "RANK": "1", "LOCAL_RANK": "1"}
    return subprocess.Popen(module_command("entrypoint.doctor.network_speed"), env=environ)


def describe_node() -> dict[str, Any]:
    """Return the checks of this node, each with the node's name, and the speed of its link in Mbit/s."""
    node = socket.gethostname()
    environ = dict(os.environ)
    if environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"]:
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


def judge(speed: tuple[float, float], backend: str, reports: Sequence[dict[str, Any]], ranks: int) -> Check:
    """Return what was measured, compared with the slowest link of the nodes."""
    latency_s, gbits = speed
    seen = f"{backend}, {1e6 * latency_s:,.0f} µs for a number, {gbits:.2f} Gbit/s for 64 MiB"
    if len(reports) == 1:
        return Check("all-reduce", "ok", f"one node, so nothing leaves it; {ranks} ranks on loopback by {seen}")
    links = [report["mbits"] for report in reports if report["mbits"]]
    seen = f"{len(reports)} nodes by {seen}"
    if len(links) < len(reports):
        return Check("all-reduce", "ok", f"{seen}; the speed of a link is not known")
    link = min(links) / 1000
    seen = f"{seen}, {100 * gbits / link:.0f} % of the slowest link ({link:g} Gbit/s)"
    if gbits < LOW_SHARE * link:
        return Check("all-reduce", "warning", seen, "look at the interfaces above, and for other traffic")
    return Check("all-reduce", "ok", seen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
