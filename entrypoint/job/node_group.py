"""The nodes of a job with one entrypoint per node."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping

from msgspec import Struct

from entrypoint.core.errors import UserError, printable


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
    if not 0 <= rank < count:
        raise UserError(f"{named}={rank}: {source} nodes, counted from 0")
    master = environ.get("MASTER_ADDR") or master
    if count > 1 and not master:
        raise UserError(f"{source}: needs MASTER_ADDR, the name or address of the first node")
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
