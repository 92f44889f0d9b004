"""How ranks on several nodes find each other: the job's master waited for by name, the interface that leads to it."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping

from entrypoint.errors import Exit, Refused, shown

SIOCGIFADDR = 0x8915
TELL_EVERY_S = 10.0
PAUSE_S = 0.5


def find_master(name: str, timeout_s: float, say: Callable[[str], None]) -> str:
    """Return the master's address, waiting for a name that does not resolve yet: its node may come later.

    Raises `Refused` after `timeout_s` seconds.
    """
    began = told = time.monotonic()
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            now, cause = time.monotonic(), error.strerror
        if now - began >= timeout_s:
            raise Refused(
                f"MASTER_ADDR={shown(name)}: does not resolve here ({cause}) after {timeout_s:.0f} s; set it to the"
                " first node's address",
                Exit.RENDEZVOUS,
            )
        if now - told >= TELL_EVERY_S:
            told = now
            say(f"waiting for MASTER_ADDR={shown(name)} to resolve ({now - began:.0f} of {timeout_s:.0f} s)")
        time.sleep(PAUSE_S)


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


def meeting_variables(environ: Mapping[str, str], timeout_s: float) -> dict[str, str]:
    """Return what ranks need beside MASTER_ADDR to meet over several nodes; a person's own interface stays.

    Raises `Refused` where the master cannot be found, or is this node's loopback, which no other node can reach.
    """
    name = environ["MASTER_ADDR"]
    address = find_master(name, timeout_s, lambda line: print(f"entrypoint: {line}", file=sys.stderr, flush=True))
    if ipaddress.ip_address(address).is_loopback:
        raise Refused(
            f"MASTER_ADDR={shown(name)}: is {address} here, which other nodes cannot reach; set it to this node's"
            " address in their network",
            Exit.RENDEZVOUS,
        )
    interface = interface_towards(address)
    wanted = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if interface else ()
    return {name: interface for name in wanted if not environ.get(name)}
