"""How ranks on several nodes find each other: the job's master waited for by name, the interface that leads to it."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TypeVar

from entrypoint.core.errors import Exit, Refused, say, shown
from entrypoint.job.detect import Job

SIOCGIFADDR = 0x8915
# Tells a job from others to ranks whose launcher does not: mpirun started by us passes it on.
JOB = "ENTRYPOINT_JOB"
TRIED_PORTS = 8
TELL_EVERY_S = 10.0
PAUSE_S = 0.5


def agreed_port(job_id: str) -> int:
    """Return the port that every node works out from the job's id, above Linux's ephemeral range (32768 to 60999)."""
    return 61000 + (int(job_id) if job_id.isdecimal() else zlib.crc32(job_id.encode())) % 4000


def next_ports(port: int) -> tuple[int, ...]:
    """Return the ports that ranks meet on: one of `agreed_port`, and those that they take where it is taken."""
    return tuple(61000 + (port - 61000 + step) % 4000 for step in range(TRIED_PORTS))


def guards_ports(port: int) -> tuple[int, ...]:
    """Return the ports of which the ranks' guards meet on the first that is free, above the ranks' own."""
    return tuple(65000 + (port + step) % 536 for step in range(TRIED_PORTS))


def port_number(text: str) -> int:
    """Return the port that a person or a platform wants ranks to meet on; raises `Refused` where it is none."""
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) < 65536:
        raise Refused(f"MASTER_PORT={shown(text)}: not a port; expected a number from 1 to 65535")
    return int(text)


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


T = TypeVar("T")


def keep_trying(attempt: Callable[[], T], awaited: str, timeout_s: float, refusal: Callable[[str], str]) -> T:
    """Return what `attempt` does once it raises no OSError, and say meanwhile what is waited for.

    Raises `Refused` after `timeout_s` seconds, in the words that `refusal` makes of the last error.
    """
    began = told = time.monotonic()
    while True:
        try:
            return attempt()
        except OSError as error:
            now, cause = time.monotonic(), error.strerror or str(error)
        if now - began >= timeout_s:
            raise Refused(refusal(cause), Exit.RENDEZVOUS)
        if now - told >= TELL_EVERY_S:
            told = now
            say(f"waiting for {awaited} ({now - began:.0f} of {timeout_s:.0f} s)")
        time.sleep(PAUSE_S)


def address_named(name: str) -> str:
    """Return a name's first address; raises socket.gaierror where it does not resolve."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def find_master(name: str, timeout_s: float) -> str:
    """Return the master's address, waiting for a name that does not resolve yet: its node may come later.

    Raises `Refused` after `timeout_s` seconds.
    """

    def refusal(cause: str) -> str:
        late = f"does not resolve here ({cause}) after {timeout_s:.0f} s"
        return f"MASTER_ADDR={shown(name)}: {late}; set it to the first node's address"

    awaited = f"MASTER_ADDR={shown(name)} to resolve"
    return keep_trying(lambda: address_named(name), awaited, timeout_s, refusal)


def interface_towards(address: str) -> str:
    """Return the network interface that the kernel's route to an address takes, empty where it is not known."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing: it only has the kernel choose
            own = probe.getsockname()[0]
    except OSError:
        return ""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == own), "")


def address_of(interface: str) -> str:
    """Return an interface's IPv4 address, empty where it has none (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


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


def is_own_name(name: str) -> bool:
    """Tell whether a host name is this node's, with or without its domain."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]


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
