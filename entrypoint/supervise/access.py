"""Who may take part in a run's failure channel: monitors with the job's key; on one node, those of its own user."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

from msgspec import Struct, field

# How long a rank waits for the key that rank 0 writes, before it goes on without one.
KEY_WAIT_S = 30.0


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


def is_own_user(peer: socket.socket) -> bool:
    """Return whether this user's process is on the other side of a Unix socket (unix(7), SO_PEERCRED)."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid) == os.getuid()
