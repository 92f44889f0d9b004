"""Who may take part in a run's failure channel: monitors with the job's key, else those on the job's own hosts."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct, field

from entrypoint.core.network import is_own_address
from entrypoint.machine.procfs import ROOT, read_lines

# How long a rank waits for the key that rank 0 writes, before it goes on without one.
KEY_WAIT_S = 30.0
RESOLVE_LIMIT_S = 10.0


class Access(Struct):
    """The job's key, read again for each connection, and the names of the job's hosts where it has none.

    Every address is accepted if no hosts are known, if a name of them does not resolve, or if rank 0 is reached by
    another network than their names'. A rank waits for a key that `is_drawn`. A job on one node has no key: with
    `own_user_only` the kernel says whose process is on the other side.
    """

    read_key: Callable[[], bytes] = bytes
    hosts: tuple[str, ...] = ()
    is_drawn: bool = False
    own_user_only: bool = False
    addresses: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    created: float = field(default_factory=time.monotonic)

    def awaits(self, key: bytes) -> bool:
        """Return whether a rank that has read this key is to wait for the one that rank 0 draws."""
        return self.is_drawn and not key and time.monotonic() - self.created < KEY_WAIT_S

    def resolve_hosts(self, master: str) -> None:
        """Resolve the names of the hosts; `master` is rank 0's host. It may take as long as the name service does."""
        start, found = time.monotonic(), set()
        for host in self.hosts if not self.read_key() else ():
            addresses = resolve_all(host)
            if not addresses or time.monotonic() - start > RESOLVE_LIMIT_S:
                return
            found |= addresses
        if found & resolve_all(master):
            self.addresses = found

    def accepts(self, address: str) -> bool:
        """Return whether a connection from an address may go on; with a key its messages say so."""
        if self.read_key() or not self.addresses:
            return True
        if address in self.addresses or is_own_address(address.partition("%")[0]):
            return True
        self.refused.add(address)
        return False

    def trusts(self, peer: socket.socket) -> bool:
        """Return whether the process on the other side of a TCP connection may take part, by its user."""
        return not self.own_user_only or is_own_process(peer)


def resolve_all(host: str) -> set[str]:
    """Return all addresses of a host; a name that does not resolve has none."""
    with suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return set()


def is_own_user(peer: socket.socket) -> bool:
    """Return whether this user's process is on the other side of a Unix socket (unix(7), SO_PEERCRED)."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid) == os.getuid()


def is_own_process(peer: socket.socket) -> bool:
    """Return whether this user's process on this node is on the other side of a TCP connection (proc(5), net/tcp).

    True where the kernel does not say it (gVisor).
    """
    own, other = peer.getsockname(), peer.getpeername()
    ports = f":{other[1]:04X}", f":{own[1]:04X}"
    addresses = plain_address(other[0]), plain_address(own[0])
    lines = [line.split() for table in ("tcp", "tcp6") for line in read_lines(ROOT / "proc/net" / table)]
    for _, local, remote, _, _, _, _, uid, *_ in lines:
        if (local[-5:], remote[-5:]) == ports and (table_address(local), table_address(remote)) == addresses:
            return int(uid) == os.getuid()
    return not lines


def plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address; one of IPv4 that was mapped into IPv6 is one of IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return address.ipv4_mapped or address if isinstance(address, ipaddress.IPv6Address) else address


def table_address(field: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address of a field `ADDRESS:PORT` of the kernel's table: words of 4 bytes in the machine's order."""
    digits = bytes.fromhex(field.partition(":")[0])
    words = [digits[at : at + 4] for at in range(0, len(digits), 4)]
    text = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return plain_address(str(ipaddress.ip_address(text)))
