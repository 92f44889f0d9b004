"""Who may take part in a run's failure channel: monitors with the job's key; on one node, those of its own user."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct, field

from entrypoint.supervise.wire import Session

if TYPE_CHECKING:
    from entrypoint.supervise.event_loop import Role

# How long a rank waits for the key that rank 0 writes, before it goes on without one.
KEY_WAIT_S = 30.0
CONNECT_TIMEOUT_S = 2.0


class Access(Struct):
    """The job's key, read again for each connection; a rank waits for a key that `is_drawn`.

    A job on one node has no key: with `own_user_only` its monitors use Unix sockets, of which the kernel says whose
    process is on the other side.
    """

    read_key: Callable[[], bytes] = bytes
    is_drawn: bool = False
    own_user_only: bool = False
    created: float = field(default_factory=time.monotonic)

    def awaits(self, key: bytes) -> bool:
        """Return whether a rank that has read this key is to wait for the one that rank 0 draws."""
        return self.is_drawn and not key and time.monotonic() - self.created < KEY_WAIT_S

    def welcome(self, role: Role, peer: socket.socket) -> tuple[Session, Role] | None:
        """Return the session of another monitor, whose messages show whether it has the job's key.

        Of a Unix socket the kernel says whose process it is; return None where it is another user's.
        """
        if peer.family != socket.AF_UNIX:
            return Session(self.read_key(), is_server=True), role
        return (Session(is_server=True), role) if is_own_user(peer) else None


def is_own_user(peer: socket.socket) -> bool:
    """Return whether this user's process is on the other side of a Unix socket (unix(7), SO_PEERCRED)."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid) == os.getuid()


def connect_on_node(address: str) -> socket.socket | None:
    """Return a connection to a monitor on this node, None if it does not listen or is another user's process."""
    peer = socket.socket(socket.AF_UNIX)
    peer.settimeout(CONNECT_TIMEOUT_S)  # else it waits while others fill the queue
    try:
        peer.connect(address)
        if is_own_user(peer):
            return peer
    except OSError:
        pass  # it has not started yet, or it has another network namespace
    peer.close()
    return None


def connect_to(address: tuple[str, int], name_on_node: str = "") -> socket.socket | None:
    """Return a connection to rank 0's monitor, by the name of a socket if it is on this node; None if none listens."""
    if name_on_node:
        return connect_on_node(name_on_node)
    try:
        return socket.create_connection(address, timeout=CONNECT_TIMEOUT_S)
    except OSError:
        return None
