"""Who may take part in a run's failure channel: monitors with the job's key, else those on the job's own hosts."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import Struct, field

from entrypoint.core.network import is_own_address

# How long a rank waits for the key that rank 0 writes, before it goes on without one.
KEY_WAIT_S = 30.0
RESOLVE_LIMIT_S = 10.0


class Access(Struct):
    """The job's key, read again for each connection, and the names of the job's hosts where it has none.

    Every address is accepted if no hosts are known, if a name of them does not resolve, or if rank 0 is reached by
    another network than their names'. A rank waits for a key that `is_drawn`. A job on one node has no key: with
    `own_user_only` its monitors use Unix sockets, of which the kernel says whose process is on the other side.
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
