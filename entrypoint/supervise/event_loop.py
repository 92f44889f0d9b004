"""Reads and writes all connections of a monitor in one thread, with heartbeats and limits for strangers."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import selectors
import socket
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct, field

from entrypoint.core.process import start_thread
from entrypoint.supervise.admission import RankEndpoint
from entrypoint.supervise.wire import CHUNK_BYTES, INVALID, BytesSession, Session, WireError

HEARTBEAT_INTERVAL_S = 0.5
# So many ranks have a heartbeat each second: a node's connection has fewer in larger jobs.
RANKS_PER_INTERVAL_S = 2000
# How long a connection may take to prove that it takes part, and how many may be at it besides the job's own.
HANDSHAKE_LIMIT_S, MAX_STRANGERS = 5.0, 256
ACCEPTS_AT_ONCE = 64
# The pause after a connection that no file descriptor is left for.
FULL_PAUSE_S = 0.02
# What turns a connection's bytes into messages.
AnySession = Session | BytesSession


class Role(Protocol):
    """What a connection is for."""

    def handle(self, connection: Connection, message: Any, /) -> bool:
        """Handle a message, and return whether more follow."""

    def lose(self, connection: Connection, reason: str, /) -> None:
        """Handle the end of a connection; `reason` is empty if the other side said goodbye."""


class Connection(Struct, eq=False):
    """A connection to another monitor; `ranks` are those that it speaks for, and `joined` those that count."""

    socket: socket.socket
    session: AnySession
    role: Role
    opened: float = field(default_factory=time.monotonic)
    last_received: float = field(default_factory=time.monotonic)
    output: bytearray = field(default_factory=bytearray)
    ranks: dict[int, RankEndpoint] = field(default_factory=dict)
    joined: set[int] = field(default_factory=set)
    is_closed: bool = False


# Returns the session and the role of a new connection, None to refuse it.
Welcome = Callable[[socket.socket], tuple[AnySession, Role] | None]


class EventLoop:
    """Serves connections in a background thread; `lock` guards everything that roles change."""

    def __init__(self, timeout_s: float, world_size: int) -> None:
        self.timeout_s = timeout_s
        self.interval_s = min(max(HEARTBEAT_INTERVAL_S, world_size / RANKS_PER_INTERVAL_S), timeout_s / 4)
        self.lock = threading.RLock()
        self.connections: dict[Connection, None] = {}
        self.selector = selectors.DefaultSelector()
        self.max_unproven = MAX_STRANGERS
        self.next_tick = self.next_heartbeat = 0.0
        self.thread: threading.Thread | None = None
        self.is_stopped = False
        self.servers: list[socket.socket] = []

    def start(self) -> None:
        """Start the thread, once."""
        with self.lock:
            if self.thread is None:
                self.next_tick = time.monotonic()
                self.thread = start_thread(self.run)

    def listen(self, server: socket.socket, welcome: Welcome) -> None:
        """Accept connections."""
        server.settimeout(0)
        with self.lock:
            self.servers.append(server)
            self.selector.register(server, selectors.EVENT_READ, welcome)
        self.start()

    def add(self, connection: Connection) -> None:
        """Serve a connection."""
        connection.socket.settimeout(0)
        if connection.socket.family != socket.AF_UNIX:  # else a second short message waits for an answer to the first
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self.lock:
            self.connections[connection] = None
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)
        self.start()

    def send(self, connection: Connection, message: Any) -> None:
        """Send a message as far as the other side reads; the thread sends the rest."""
        with self.lock:
            if not connection.is_closed:
                self.write(connection, connection.session.encode(message))

    def write(self, connection: Connection, data: bytes) -> None:
        """Queue bytes and send what can be sent now; a lost connection is noticed when it is read."""
        connection.output += data
        try:
            sent = connection.socket.send(connection.output)
        except BlockingIOError:
            sent = 0
        except OSError:
            sent = len(connection.output)
        del connection.output[:sent]
        if len(connection.output) > connection.session.max_output:
            self.close(connection, "it does not read")
        else:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.output else 0)
            if self.selector.get_key(connection.socket).events != events:
                self.selector.modify(connection.socket, events, connection)

    def close(self, connection: Connection, reason: str = "") -> None:
        """Close a connection, and let its role know."""
        with self.lock:
            if connection.is_closed:
                return
            connection.is_closed = True
            self.connections.pop(connection, None)
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(connection.socket)
            connection.socket.close()
            connection.role.lose(connection, reason)

    def drain(self, limit_s: float) -> None:
        """Wait until the other sides' kernels have everything, for at most `limit_s` seconds.

        A process that ends with unread bytes resets its connections, and what was not confirmed is lost.
        """
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            with self.lock:
                if not any(peer.output or unconfirmed_bytes(peer.socket) for peer in self.connections):
                    return
            time.sleep(0.01)

    def stop(self) -> None:
        """Close all connections, and wait for the thread to end."""
        self.is_stopped = True
        with self.lock:
            for connection in list(self.connections):
                self.close(connection)
            for server in self.servers:
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        if self.thread:
            self.thread.join()

    def run(self) -> None:
        """Serve until the process ends or this loop is stopped."""
        while not self.is_stopped:
            events = self.selector.select(max(0.0, self.next_tick - time.monotonic()))
            with self.lock:
                for key, mask in events:
                    if isinstance(key.data, Connection):
                        self.serve(key.data, mask)
                    else:
                        self.accept(key.fileobj, key.data)  # type: ignore[arg-type]
                if time.monotonic() >= self.next_tick:
                    self.tick(time.monotonic())

    def serve(self, connection: Connection, mask: int) -> None:
        """Write and read what is due."""
        if mask & selectors.EVENT_WRITE and not connection.is_closed:
            self.write(connection, b"")
        if not mask & selectors.EVENT_READ or connection.is_closed:
            return
        try:
            data = connection.socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.close(connection, error.strerror or "connection lost")
            return
        if not data:
            self.close(connection, "its monitor exited")
            return
        connection.last_received = time.monotonic()
        try:
            messages = connection.session.decode(data)
        except WireError as error:
            self.close(connection, str(error))
            return
        self.dispatch(connection, messages)

    def dispatch(self, connection: Connection, messages: list[Any]) -> None:
        """Hand messages to the connection's role."""
        for message in messages:
            if connection.is_closed:
                return
            try:
                if not connection.role.handle(connection, message):
                    self.close(connection)
            except (ValueError, TypeError, AttributeError, KeyError):
                self.close(connection, INVALID)

    def accept(self, server: socket.socket, welcome: Welcome) -> None:
        """Accept new connections, and close those that have waited longest where there are too many."""
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                new, _ = server.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self.close_oldest(1):
                    time.sleep(FULL_PAUSE_S)  # else the pending connection would wake this thread without end
                return
            role = welcome(new)
            if role is None:
                new.close()
                continue
            connection = Connection(new, *role)
            self.add(connection)
            self.write(connection, connection.session.greeting())
        self.close_oldest(sum(not peer.session.is_proven for peer in self.connections) - self.max_unproven)

    def close_oldest(self, count: int) -> bool:
        """Close connections that have waited longest to prove that they take part; return whether there were any."""
        unproven = [connection for connection in self.connections if not connection.session.is_proven]
        for connection in unproven[: max(0, count)]:
            self.close(connection)
        return bool(unproven)

    def tick(self, now: float) -> None:
        """Send heartbeats, and close connections that are silent or do not prove that they take part."""
        was_stopped = now - self.next_tick > self.timeout_s / 2  # this process, not the others
        beats = now >= self.next_heartbeat
        for connection in list(self.connections):
            if was_stopped:
                connection.last_received = now
            if not connection.session.is_proven:
                if now - connection.opened > HANDSHAKE_LIMIT_S:
                    self.close(connection)
            elif not connection.session.has_heartbeats:
                continue
            elif now - connection.last_received > self.timeout_s:
                self.close(connection, f"silent for {self.timeout_s:.0f} s")
            elif beats:
                self.send(connection, {})
        if beats:
            self.next_heartbeat = now + self.interval_s
        self.next_tick = now + min(self.interval_s, 1.0)


def unconfirmed_bytes(connected: socket.socket) -> int:
    """Return the bytes that were sent and that the other side's kernel has not confirmed (tcp(7), SIOCOUTQ)."""
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    return 0
