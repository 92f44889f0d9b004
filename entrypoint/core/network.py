"""Network interfaces, addresses, and retries with a deadline."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError

SIOCGIFADDR = 0x8915


LOG_INTERVAL_S = 10.0
# A line for each address: address, index, prefix, scope, flags, interface (proc(5)).
IPV6_INTERFACES = Path("/proc/net/if_inet6")


RETRY_INTERVAL_S = 0.5


T = TypeVar("T")


def retry_until(attempt: Callable[[], T], description: str, timeout_s: float, make_error: Callable[[str], str]) -> T:
    """Retry `attempt` until it raises no OSError, and return its result; log `description` meanwhile.

    Raises `UserError` after `timeout_s` seconds, with the message that `make_error` builds from the last error.
    """
    start = last_log = time.monotonic()
    while True:
        try:
            return attempt()
        except OSError as error:
            now, cause = time.monotonic(), error.strerror or str(error)
        if now - start >= timeout_s:
            raise UserError(make_error(cause), ExitCode.RENDEZVOUS)
        if now - last_log >= LOG_INTERVAL_S:
            last_log = now
            log(f"waiting for {description} ({now - start:.0f} of {timeout_s:.0f} s)")
        time.sleep(RETRY_INTERVAL_S)


def resolve(name: str) -> str:
    """Return a name's first address; raises socket.gaierror if it does not resolve."""
    return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])


def address_for_route(address: str) -> str:
    """Return this node's address on the kernel's route to another one, empty if unknown."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing: the kernel only selects the route
        return str(probe.getsockname()[0])
    return ""


def interface_for_route(address: str) -> str:
    """Return the network interface of the kernel's route to an address, empty if unknown."""
    own = address_for_route(address)
    return next((name for _, name in socket.if_nameindex() if own in interface_addresses(name)), "")


def interface_address(interface: str) -> str:
    """Return an interface's IPv4 address, else its IPv6 address, empty if it has none that other hosts can reach."""
    return next(iter(interface_addresses(interface)), "")


def interface_addresses(interface: str) -> tuple[str, ...]:
    """Return an interface's addresses without link-local ones, IPv4 first."""
    return (*ipv4_addresses(interface), *ipv6_addresses(interface))


def ipv4_addresses(interface: str) -> list[str]:
    """Return an interface's IPv4 address, if it has one (netdevice(7))."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def ipv6_addresses(interface: str) -> list[str]:
    """Return an interface's IPv6 addresses without link-local ones, from /proc/net/if_inet6."""
    try:
        rows = [line.split() for line in IPV6_INTERFACES.read_text().splitlines()]
    except OSError:  # a kernel without IPv6
        return []
    addresses = [ipaddress.IPv6Address(int(digits, 16)) for digits, *_, name in rows if name == interface]
    return [str(address) for address in addresses if not address.is_link_local]


def is_loopback_name(name: str) -> bool:
    """Return whether a host name or address always means this machine."""
    return name in ("localhost", "::1") or name.startswith("127.")


def is_this_host(name: str) -> bool:
    """Return whether a host name is this node's, with or without its domain."""
    return name.partition(".")[0] == socket.gethostname().partition(".")[0]


def try_listen(port: int, addresses: tuple[str, ...] = ()) -> list[socket.socket]:
    """Return sockets that listen on a port of these addresses, or of all; none if the port is taken on one of them.

    An address that cannot be bound (one of IPv6 that is not ready) is left out while another one can.
    """
    listening: list[socket.socket] = []
    six = socket.has_dualstack_ipv6()
    for address in addresses or ("",):
        family = socket.AF_INET6 if ":" in address or (six and not address) else socket.AF_INET
        dual = family == socket.AF_INET6 and not address
        try:
            listening.append(socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=1024))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                for one in listening:
                    one.close()
                return []
    return listening or (try_listen(port) if addresses else [])


def addresses_towards(host: str, interface: str) -> tuple[str, ...]:
    """Return this node's addresses by which others reach it: those of its name for them, and of the interface.

    Empty if neither has one, as where a name or a port leads here from another address.
    """
    try:
        names = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        names = set()
    own = {address for address in names if is_own_address(address)}
    reached = set(interface_addresses(interface)) if interface else set()
    if own and all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in own):
        if host in own or host == "localhost":
            return tuple(sorted(own))
        if not reached:  # Debian's 127.0.1.1 is for the ranks of this node alone
            return ()
    return tuple(sorted(own | reached))


def hold_port(port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port, by default a free one, and does not listen.

    Linux lets another program listen on it if both set SO_REUSEADDR, as torch's store does. The kernel gives the port
    to no other program meanwhile (socket(7), ip(7)). Raises OSError if a program listens on the port.
    """
    held = socket.socket()
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", port))
    except OSError:
        held.close()
        raise
    return held


def is_own_address(address: str) -> bool:
    """Return whether an address belongs to this node; the kernel binds no other."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
            probe.bind((address, 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True
