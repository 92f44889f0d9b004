"""The ways to a job's store: for programs on this node by loopback, for other nodes by the job's key.

A program's store client speaks torch's protocol, which has no key. So it connects to its own monitor on loopback, where
the kernel says whose process it is. The monitor of another rank carries its bytes to rank 0's, on a connection that
starts as those of the failure channel do: both sides show that they have the job's key.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

from entrypoint.core.console import log
from entrypoint.core.network import RETRY_INTERVAL_S
from entrypoint.core.process import start_thread
from entrypoint.supervise.access import Access
from entrypoint.supervise.event_loop import HANDSHAKE_LIMIT_S, Connection, EventLoop
from entrypoint.supervise.store_commands import JobStore, StoreSession
from entrypoint.supervise.wire import BytesSession, Message, Session, WireError, shake_hands

LOOPBACK = "127.0.0.1"
# torch's clients have sockets of IPv6, with the IPv4 address at its end.
TCP_SOCKETS = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
NEVER_MET = (
    "warning: no rank opened torch's process group. Unless the ranks share the work in another way, each did all of it."
    " Call torch.distributed.init_process_group(), tell your framework how many devices it has, or set"
    " LAUNCH_NPROC_PER_NODE=1."
)
# Who meets in a store: the ranks of a job, or torchrun's agents, which restart theirs.
RANKS, AGENTS = "ranks", "agents"
OTHER_RESTARTS = "not all nodes restart failed ranks. Set LAUNCH_MAX_RESTARTS alike on all of them."


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Return a socket for programs on this node; raises OSError if the port is taken."""
    return socket.create_server((LOOPBACK, port), backlog=1024)


def is_own_program(peer: socket.socket) -> bool:
    """Return whether a process of this user is on the other side of a loopback connection (proc(5), /proc/net/tcp).

    Where there are no such files, the connection is accepted.
    """
    there, here = (  # as /proc/net/tcp has an address: the number as it lies in memory, and the port
        f"{struct.unpack('=I', socket.inet_aton(host))[0]:08X}:{port:04X}"
        for host, port in (peer.getpeername(), peer.getsockname())
    )
    readable = [file for file in TCP_SOCKETS if file.exists()]
    rows = (line.split() for file in readable for line in file.read_text().splitlines())
    owners = [int(row[7]) for row in rows if row[1].endswith(there) and row[2].endswith(here)]
    return owners == [os.getuid()] or not readable


class StoreDoor:
    """Lets connections in to the store: this user's programs, and monitors with the job's key or of this user.

    `tell` is called where those of another `kind` come.
    """

    def __init__(self, loop: EventLoop, kind: str = RANKS, tell: Callable[[], None] = lambda: None) -> None:
        self.loop, self.store, self.kind, self.tell = loop, JobStore(loop), kind, tell
        self.was_opened = False  # to the monitor of another rank

    def warn_if_unused(self) -> None:
        """Log that the ranks of a job that has ended never met: a script without a process group trains N times."""
        if not self.store.was_used:
            log(NEVER_MET)

    def welcome_program(self, peer: socket.socket) -> tuple[StoreSession, JobStore] | None:
        """Return the session of a program on this node, None for another user's."""
        return (StoreSession(), self.store) if is_own_program(peer) else None

    def handle(self, connection: Connection, message: Message) -> bool:
        """Let a monitor in: what follows on the connection are a program's commands."""
        if message.get("store") not in (RANKS, AGENTS):
            return False
        self.loop.send(connection, {"store": self.kind})
        if message["store"] != self.kind:
            self.tell()
            return True
        connection.session, connection.role = StoreSession(), self.store
        self.was_opened = True
        return True

    def lose(self, _connection: Connection, _reason: str) -> None:
        """Do nothing: who is not let in is not missed."""


class Bridge:
    """Passes bytes between a program's connection and one to rank 0's store, and keeps them until that is open."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.program: Connection | None = None
        self.upstream: Connection | None = None
        self.waiting = b""
        self.is_closed = False

    def handle(self, connection: Connection, data: bytes) -> bool:
        """Pass data on."""
        if connection is not self.upstream:
            self.program = connection
        other = self.program if connection is self.upstream else self.upstream
        if other:
            self.loop.write(other, data)
        else:
            self.waiting += data
        return True

    def lose(self, connection: Connection, _reason: str) -> None:
        """Close the other side too."""
        self.is_closed = True
        for other in (self.program, self.upstream):
            if other and other is not connection:
                self.loop.close(other)

    def open(self, upstream: socket.socket) -> None:
        """Pass on what has waited for the connection to rank 0."""
        with self.loop.lock:
            if self.is_closed:
                upstream.close()
                return
            self.upstream = Connection(upstream, BytesSession(), self)
            self.loop.add(self.upstream)
            self.loop.write(self.upstream, self.waiting)


class StoreRelay:
    """Connects this rank's program to the store of rank 0, which `connect` reaches (None while it does not).

    `give_up` is called with the reason where the store is for others, and with none where the timeout passes.
    """

    def __init__(
        self,
        loop: EventLoop,
        access: Access,
        timeout_s: float,
        connect: Callable[[], socket.socket | None],
        give_up: Callable[[str], None] = lambda _: None,
        kind: str = RANKS,
    ) -> None:
        self.loop, self.access, self.timeout_s, self.connect, self.give_up = loop, access, timeout_s, connect, give_up
        self.kind = kind

    def welcome(self, peer: socket.socket) -> tuple[BytesSession, Bridge] | None:
        """Return the session of a program on this node, None for another user's."""
        if not is_own_program(peer):
            return None
        bridge = Bridge(self.loop)
        start_thread(self.find_store, bridge)
        return BytesSession(), bridge

    def find_store(self, bridge: Bridge | None = None) -> None:
        """Connect to rank 0's store, and retry until the timeout; runs in a thread of its own.

        Then the program's connection is closed: a client of torch waits for the first answer without a limit. Without
        a `bridge` it is only seen who meets there.
        """
        until = time.monotonic() + self.timeout_s
        while not (bridge and bridge.is_closed) and time.monotonic() < until:
            key = self.access.read_key()
            peer = None if self.access.awaits(key) else self.connect()
            kind = self.kind_of_store(peer, Session(key)) if peer else ""
            if bridge and peer and kind == self.kind:
                bridge.open(peer)
                return
            if peer:
                peer.close()
            if kind == self.kind:
                return
            if kind in (RANKS, AGENTS):
                self.give_up(OTHER_RESTARTS)
                return
            time.sleep(RETRY_INTERVAL_S)
        if bridge and bridge.program:
            self.give_up("")
            self.loop.close(bridge.program)

    def kind_of_store(self, peer: socket.socket, session: Session) -> str:
        """Show the job's key and see the other side's; return who meets in its store, nothing for no store."""
        try:
            (answer,) = shake_hands(peer, session, {"store": self.kind}, HANDSHAKE_LIMIT_S)
            return str(answer.get("store"))
        except (WireError, OSError, ValueError):
            return ""  # it is tried again; the failure channel says what answers there
