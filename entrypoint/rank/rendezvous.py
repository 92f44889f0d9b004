"""How ranks on several nodes find each other: the job's master waited for by name, the interface that leads to it."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import interface_address, interface_for_route, is_this_host, resolve, retry_until
from entrypoint.job.detect import Job


def check_port_free(port: int) -> None:
    """Raise `UserError` where another program already listens on this port."""
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise UserError(
            f"MASTER_PORT={port}: cannot be listened on here ({cause}); set another one, the same on all nodes",
            ExitCode.RENDEZVOUS,
        ) from None


def resolve_master(name: str, timeout_s: float) -> str:
    """Return the master's address, waiting for a name that does not resolve yet: its node may come later.

    Raises `UserError` after `timeout_s` seconds.
    """

    def refusal(cause: str) -> str:
        late = f"does not resolve here ({cause}) after {timeout_s:.0f} s"
        return f"MASTER_ADDR={printable(name)}: {late}; set it to the first node's address"

    awaited = f"MASTER_ADDR={printable(name)} to resolve"
    return retry_until(lambda: resolve(name), awaited, timeout_s, refusal)


def rendezvous_variables(environ: Mapping[str, str], timeout_s: float, job: Job) -> dict[str, str]:
    """Return what ranks need beside MASTER_ADDR to meet over several nodes; a person's own interface stays.

    The master's own name may be its loopback there (Debian's 127.0.1.1): then the way to another node tells the
    interface. Raises `UserError` where the master cannot be found, or is loopback on a node that is not the master.
    """
    name = environ["MASTER_ADDR"]
    address = resolve_master(name, timeout_s)
    own = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME", "")
    if own or not ipaddress.ip_address(address).is_loopback:
        interface = own or interface_for_route(address)
    elif is_this_host(name) or job.rank == 0:
        interface = find_own_interface(job.hostnames)
    else:
        raise UserError(
            f"MASTER_ADDR={printable(name)}: is {address} here, which other nodes cannot reach; set it to this node's"
            " address in their network",
            ExitCode.RENDEZVOUS,
        )
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {name: interface for name in wanted if not environ.get(name)}


def local_address(environ: Mapping[str, str], timeout_s: float, job: Job) -> str:
    """Return this node's address in the network that leads to MASTER_ADDR, empty where it has none of IPv4.

    Raises `UserError` as `meeting_variables` does.
    """
    interface = {**environ, **rendezvous_variables(environ, timeout_s, job)}.get("GLOO_SOCKET_IFNAME", "")
    return interface_address(interface.split(",")[0]) if interface else ""


def find_own_interface(nodes: tuple[str, ...]) -> str:
    """Return the interface that leads to the job's other nodes; where none is known, the only one that there is.

    Raises `UserError` where several might be it.
    """
    for node in nodes:
        with suppress(OSError):
            address = resolve(node)
            if not is_this_host(node) and (interface := interface_for_route(address)):
                return interface
    found = [
        name
        for _, name in socket.if_nameindex()
        if interface_address(name) and not interface_address(name).startswith("127.")
    ]
    if len(found) == 1:
        return found[0]
    raise UserError(
        f"MASTER_ADDR: this node's own name is its loopback, and it has {len(found)} interfaces ({', '.join(found)});"
        " set MASTER_ADDR to this node's address in the job's network, or GLOO_SOCKET_IFNAME to its interface",
        ExitCode.RENDEZVOUS,
    )
