"""Who may take part in a run's failure channel: monitors with the job's key, else those on the job's own hosts."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from entrypoint.core.network import is_own_address
from entrypoint.supervise.wire import Session


@dataclass
class Access:
    """The job's key, read again for each connection, and the names of the job's hosts where it has none.

    Every address is accepted if no hosts are known, or the addresses of some are not.
    """

    read_key: Callable[[], bytes] = bytes
    hosts: tuple[str, ...] = ()
    addresses: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)

    def session(self, *, is_server: bool = False) -> Session:
        """Return the session of a new connection."""
        return Session(self.read_key(), is_server=is_server)

    def accepts(self, address: str) -> bool:
        """Return whether a connection from an address may go on; with a key its messages say so."""
        if self.read_key() or not self.hosts:
            return True
        if address not in self.addresses:
            found = [resolve_all(host) for host in self.hosts]
            if not all(found):
                return True
            self.addresses.update(*found)
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
