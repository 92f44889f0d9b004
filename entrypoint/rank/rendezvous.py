"""Rendezvous across nodes: resolve the master's address and select the network interface."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import (
    interface_address,
    interface_addresses,
    interface_for_route,
    is_this_host,
    resolve,
    retry_until,
)
from entrypoint.job.detect import Job
from entrypoint.machine.procfs import read_lines


def resolve_master(name: str, timeout_s: float) -> str:
    """Return the master's address; wait for a name that does not resolve yet, because its node may start later.

    Raises `UserError` after `timeout_s` seconds.
    """

    def make_error(cause: str) -> str:
        late = f"does not resolve here ({cause}) after {timeout_s:.0f} s"
        return f"MASTER_ADDR={printable(name)}: {late}. Set it to the first node's address."

    description = f"MASTER_ADDR={printable(name)} to resolve"
    return retry_until(lambda: resolve(name), description, timeout_s, make_error)


def rendezvous_variables(environ: Mapping[str, str], timeout_s: float, job: Job) -> dict[str, str]:
    """Return the interface variables for a rendezvous across nodes; an interface that the user set is kept.

    The master's host name may resolve to its loopback address there (Debian's 127.0.1.1). The route to another node
    then determines the interface. Raises `UserError` if the master's name does not resolve, or resolves to loopback on
    another node.
    """
    name = environ["MASTER_ADDR"]
    address = resolve_master(name, timeout_s)
    chosen = environ.get("GLOO_SOCKET_IFNAME") or environ.get("NCCL_SOCKET_IFNAME", "")
    if chosen or not ipaddress.ip_address(address).is_loopback:
        interface = chosen or interface_for_route(address)
    elif is_this_host(name) or job.rank == job.local_rank:  # on the first node
        interface = find_own_interface(name, job.hostnames)
    else:
        raise UserError(
            f"MASTER_ADDR={printable(name)}: resolves to {address} here, which other nodes cannot reach. Set it to the"
            " first node's address in the job's network.",
            ExitCode.RENDEZVOUS,
        )
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {name: interface for name in wanted if not environ.get(name)}


def local_address(environ: Mapping[str, str], timeout_s: float, job: Job) -> str:
    """Return this node's address in the network that leads to MASTER_ADDR, empty if it has none.

    Raises `UserError` as `rendezvous_variables` does.
    """
    interface = {**environ, **rendezvous_variables(environ, timeout_s, job)}.get("GLOO_SOCKET_IFNAME", "")
    return interface_address(interface.split(",")[0]) if interface else ""


def find_own_interface(master: str, nodes: tuple[str, ...]) -> str:
    """Return the interface of the route to the job's other nodes, else the node's only interface that is up.

    Raises `UserError` if there are several candidates.
    """
    for node in nodes:
        with suppress(OSError):
            address = resolve(node)
            if not is_this_host(node) and (interface := interface_for_route(address)):
                return interface
    names = [
        name
        for _, name in socket.if_nameindex()
        if any(not ipaddress.ip_address(address).is_loopback for address in interface_addresses(name))
        and "down" not in "".join(read_lines(Path("/sys/class/net", name, "operstate")))  # docker0 without a container
    ]
    if len(names) == 1:
        return names[0]
    raise UserError(
        f"MASTER_ADDR={printable(master)}: is a loopback address here, and there are {len(names)} interfaces"
        f" ({', '.join(names)}). Set it to this node's address in the job's network, or GLOO_SOCKET_IFNAME to its"
        " interface.",
        ExitCode.RENDEZVOUS,
    )
