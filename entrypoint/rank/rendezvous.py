"""How ranks on several nodes find each other: the job's master waited for by name, the interface that leads to it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from entrypoint.core.errors import Exit, Refused, shown
from entrypoint.core.network import address_named, address_of, interface_towards, is_own_name, keep_trying
from entrypoint.job.detect import Job


def refuse_taken(port: int) -> None:
    """Raise `Refused` where another program already listens on this port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise Refused(
            f"MASTER_PORT={port}: cannot be listened on here ({cause}); set another one, the same on all nodes",
            Exit.RENDEZVOUS,
        ) from None


def find_master(name: str, timeout_s: float) -> str:
    """Return the master's address, waiting for a name that does not resolve yet: its node may come later.

    Raises `Refused` after `timeout_s` seconds.
    """

    def refusal(cause: str) -> str:
        late = f"does not resolve here ({cause}) after {timeout_s:.0f} s"
        return f"MASTER_ADDR={shown(name)}: {late}; set it to the first node's address"

    awaited = f"MASTER_ADDR={shown(name)} to resolve"
    return keep_trying(lambda: address_named(name), awaited, timeout_s, refusal)


def meeting_variables(environ: Mapping[str, str], timeout_s: float, job: Job) -> dict[str, str]:
    """Return what ranks need beside MASTER_ADDR to meet over several nodes; a person's own interface stays.

    The master's own name may be its loopback there (Debian's 127.0.1.1): then the way to another node tells the
    interface. Raises `Refused` where the master cannot be found, or is loopback on a node that is not the master.
    """
    name = environ["MASTER_ADDR"]
    address = find_master(name, timeout_s)
    own = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME", "")
    if own or not ipaddress.ip_address(address).is_loopback:
        interface = own or interface_towards(address)
    elif is_own_name(name) or job.rank == 0:
        interface = own_interface(job.nodes)
    else:
        raise Refused(
            f"MASTER_ADDR={shown(name)}: is {address} here, which other nodes cannot reach; set it to this node's"
            " address in their network",
            Exit.RENDEZVOUS,
        )
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {name: interface for name in wanted if not environ.get(name)}


def local_address(environ: Mapping[str, str], timeout_s: float, job: Job) -> str:
    """Return this node's address in the network that leads to MASTER_ADDR, empty where it has none of IPv4.

    Raises `Refused` as `meeting_variables` does.
    """
    interface = {**environ, **meeting_variables(environ, timeout_s, job)}.get("GLOO_SOCKET_IFNAME", "")
    return address_of(interface.split(",")[0]) if interface else ""


def own_interface(nodes: tuple[str, ...]) -> str:
    """Return the interface that leads to the job's other nodes; where none is known, the only one that there is.

    Raises `Refused` where several might be it.
    """
    for node in nodes:
        with suppress(OSError):
            address = address_named(node)
            if not is_own_name(node) and (interface := interface_towards(address)):
                return interface
    found = [name for _, name in socket.if_nameindex() if address_of(name) and not address_of(name).startswith("127.")]
    if len(found) == 1:
        return found[0]
    raise Refused(
        f"MASTER_ADDR: this node's own name is its loopback, and it has {len(found)} interfaces ({', '.join(found)});"
        " set MASTER_ADDR to this node's address in the job's network, or GLOO_SOCKET_IFNAME to its interface",
        Exit.RENDEZVOUS,
    )
