"""The nodes of a job with one entrypoint per node, and the ports that they derive from its id."""

from __future__ import annotations

import ipaddress
import re
import zlib
from collections.abc import Mapping

from msgspec import Struct

from entrypoint.core.errors import UserError, printable, refuse_if

# Identifies the job if the launcher does not. An mpirun that the entrypoint starts forwards it.
JOB_TOKEN_VAR = "ENTRYPOINT_JOB"
# Start time of the whole command (Unix time, s). The trainer's total_seconds counts from it. A launcher that the
# entrypoint starts forwards it to the ranks.
START_TIME_VAR = "ENTRYPOINT_STARTED"
# Above Linux's ephemeral range (32768 to 60999): ports for ranks, then as many for failure channels.
FIRST_PORT, PORT_COUNT = 61000, 2200


def port_from_job_id(job_id: str) -> int:
    """Return the port that every node derives from the job's id."""
    return FIRST_PORT + (int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())) % PORT_COUNT


def monitor_port(port: int) -> int:
    """Return the port of the failure channel of ranks that meet on this port."""
    return FIRST_PORT + PORT_COUNT + port % PORT_COUNT


def parse_port(text: str, source: str = "") -> int:
    """Return the rendezvous port that the user or platform sets; raises `UserError` if it is invalid.

    `source` is how it is set, by default MASTER_PORT.
    """
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        source = source or f"MASTER_PORT={text}"
        raise UserError(f"{printable(source)}: not a port; expected a number from 1 to 65535")
    return int(text)


class NodeGroup(Struct, frozen=True):
    """This node's rank among the job's nodes; `source` is empty if there is only one.

    `master_addr` is the address or name of node 0 if known. `port` is the rendezvous port (empty: the entrypoint
    chooses it). `nproc_per_node` and `interface` come from the environment. `min_nodes` is the minimum number of nodes
    of an elastic job. Of its up to `nnodes` nodes only node 0 is fixed; the others get their ranks when they join.
    """

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = ""
    port: str = ""
    nproc_per_node: int | None = None
    interface: str = ""
    source: str = ""
    min_nodes: int | None = None


def claim_node(environ: Mapping[str, str], count: int, rank: int, named: str, master: str, source: str) -> NodeGroup:
    """Return the group that a platform gives; the user's MASTER_ADDR and MASTER_PORT win.

    `named` says where the rank is from. Raises `UserError` if it is out of range, or several nodes have no master.
    """
    master = environ.get("MASTER_ADDR") or master
    refuse_if(
        {
            f"{named}={rank}: {source} nodes, counted from 0": not 0 <= rank < count,
            f"{source}: needs MASTER_ADDR, the name or address of the first node": count > 1 and not master,
        }
    )
    return NodeGroup(count, rank, master, environ.get("MASTER_PORT", ""), source=source)


def check_master(master: str) -> None:
    """Raise `UserError` if this cannot be a host: a list of hosts, or a host with its port, would never resolve."""
    try:
        is_host = bool(re.fullmatch(r"[\w.-]+", master)) or bool(ipaddress.ip_address(master))
    except ValueError:
        is_host = False
    if not is_host:
        raise UserError(
            f"MASTER_ADDR={printable(master)}: is no host. Set it to one name or address, and MASTER_PORT to a port."
        )
