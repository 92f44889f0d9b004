"""Speaks for the ranks of a node: they connect to its first rank's monitor, which has the node's connection to rank 0.

The node's ranks use a Unix socket without a file. The kernel says whose process is on the other side.
"""

from __future__ import annotations

import hashlib
import os
import socket

from msgspec.structs import asdict

from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.channel_state import ChannelState
from entrypoint.supervise.event_loop import Connection
from entrypoint.supervise.wire import Message


def relay_address(endpoint: RankEndpoint) -> str:
    """Return the name of the node's socket for a run, in Linux's abstract namespace (unix(7))."""
    text = f"{endpoint.host} {endpoint.port} {endpoint.token} {endpoint.node}"
    return f"\0reference-training-{os.getuid()}-{hashlib.sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"


def port_address(port: int, what: str = "port") -> str:
    """Return the name of the socket that replaces a port of rank 0's monitor or store if all ranks are on this node."""
    return f"\0reference-training-{os.getuid()}-{what}-{port}"


def listen_on_node(address: str) -> socket.socket | None:
    """Return a socket for other ranks on this node, None if the name is taken."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.bind(address)
        server.listen(1024)
    except OSError:
        server.close()
        return None
    return server


class NodeRelay:
    """Passes the messages of a node's other ranks to rank 0, and rank 0's answers back."""

    def __init__(self, channel: ChannelState) -> None:
        self.channel = channel
        self.ranks: dict[tuple[int, int], Connection] = {}
        self.upstream: Connection | None = None
        self.waiting: list[Message] = []

    def connect(self, upstream: Connection) -> None:
        """Pass on what has waited for the connection to rank 0."""
        self.upstream = upstream
        waiting, self.waiting = self.waiting, []
        for message in waiting:
            self.pass_on(message)

    def disconnect(self, *, rank0_ended: bool) -> None:
        """Let the node's ranks know that rank 0 has ended; without it this monitor reports a loss to them."""
        self.upstream = None
        if rank0_ended:
            for connection in list(self.ranks.values()):
                self.channel.loop.send(connection, {"bye": 0})

    def handle(self, connection: Connection, message: Message) -> bool:
        """Pass a rank's message on."""
        if "hello" in message:
            endpoint = RankEndpoint(**message["hello"])
            connection.ranks[endpoint.rank] = endpoint
            self.ranks[endpoint.rank, endpoint.pid] = connection
        elif not connection.ranks:
            return False
        if "first_failure" in message:
            self.channel.report_failure(FirstFailure(**message["first_failure"]), source=connection)
        if "joined" in message:
            connection.joined.add(message["joined"])
            self.channel.node_peers.add(message["joined"])
            if self.channel.first_failure:  # it came between the rank's hello and now
                self.channel.loop.send(connection, {"first_failure": asdict(self.channel.first_failure)})
        if "hello" in message or "joined" in message or "bye" in message:
            self.pass_on({name: value for name, value in message.items() if name != "first_failure"})
        if "bye" in message:
            connection.joined.discard(message["bye"])
            return False
        return True

    def pass_on(self, message: Message) -> None:
        """Send a message to rank 0, now or when it is found."""
        if self.upstream:
            self.channel.loop.send(self.upstream, message)
        else:
            self.waiting.append(message)

    def route(self, message: Message) -> None:
        """Pass rank 0's answer to the rank that asked."""
        rank, pid = message["to"]
        connection = self.ranks.get((rank, pid))
        if connection:
            self.channel.loop.send(connection, message)
            if "welcome" not in message:
                connection.ranks.clear()
                self.channel.loop.close(connection)

    def lose(self, connection: Connection, reason: str) -> None:
        """Report a rank that is lost after it joined."""
        for endpoint in connection.ranks.values():
            self.ranks.pop((endpoint.rank, endpoint.pid), None)
            self.channel.node_peers.discard(endpoint.rank)
            if endpoint.rank in connection.joined and reason and not self.channel.closed.is_set():
                self.channel.report_lost(endpoint, reason)
