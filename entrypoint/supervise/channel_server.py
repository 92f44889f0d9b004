"""Rank 0's side of the failure channel: admits the other ranks, and notices when one is lost.

The relay of a node speaks for its ranks: they connect to its first rank's monitor, which has the node's connection to
rank 0. They use a Unix socket without a file. The kernel says whose process is on the other side.
"""

from __future__ import annotations

import hashlib
import os
import resource
import socket
import threading
from functools import partial

from msgspec.structs import asdict, replace

from entrypoint.core.console import log
from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import Admission, FirstFailure, RankEndpoint
from entrypoint.supervise.event_loop import Connection, EventLoop
from entrypoint.supervise.wire import Message

# The exit code of a first failure on a node that no longer responds.
NODE_LOST_CODE = -1
# The longest description in characters: a message is one line of the wire.
MAX_HOW = 4000


class ChannelState:
    """The state of a failure channel; `lock` guards it, and `first_failure` is set when a rank fails or a node is lost.

    `peers` are the ranks that have joined rank 0, or rank 0 itself; `node_peers` those that this monitor speaks for.
    `obstacle` is a sentence about what answers at rank 0's port in place of rank 0.
    """

    def __init__(self, endpoint: RankEndpoint, timeout_s: float, access: Access | None = None) -> None:
        self.endpoint = endpoint
        self.access = access or Access()
        self.loop = EventLoop(timeout_s, endpoint.world_size)
        self.lock = self.loop.lock
        self.admission = Admission(endpoint)
        self.peers: dict[int, RankEndpoint] = {}
        self.node_peers: set[int] = set()
        self.first_failure: FirstFailure | None = None
        self.obstacle = ""
        self.connected = threading.Event()
        self.closed = threading.Event()

    def report_failure(self, failure: FirstFailure, source: Connection | None = None) -> None:
        """Record the first failure, and send it to all that have joined but its `source`."""
        failure = replace(failure, how=failure.how[:MAX_HOW], lost_collective=failure.lost_collective[:MAX_HOW])
        with self.lock:
            if self.first_failure is not None:
                return
            self.first_failure = failure
            for connection in list(self.loop.connections):
                if connection.joined and connection is not source:
                    self.loop.send(connection, {"first_failure": asdict(failure)})

    def report_lost(self, endpoint: RankEndpoint, reason: str) -> None:
        """Report that a rank's node no longer responds."""
        self.report_failure(FirstFailure(endpoint.rank, endpoint.node, NODE_LOST_CODE, f"its node is lost: {reason}"))


# File descriptors besides those of the connections.
OTHER_FILES = 64


class ChannelServer:
    """Serves the nodes of a run, each of which speaks for its ranks on one connection."""

    def __init__(self, channel: ChannelState) -> None:
        self.channel = channel
        self.connections: dict[int, Connection] = {}

    def listen(self, listening: list[socket.socket], connections: int) -> None:
        """Accept connections of other nodes; `connections` is how many there may be."""
        loop = self.channel.loop
        raise_file_limit(connections + OTHER_FILES)
        loop.max_unproven += connections
        for server in listening:
            loop.listen(server, partial(self.channel.access.welcome, self))

    def handle(self, connection: Connection, message: Message) -> bool:
        """Admit a rank, or note what one reports; a message before the first admission ends the connection."""
        if "hello" in message:
            return self.greet(connection, RankEndpoint(**message["hello"]))
        if not connection.ranks:
            return False
        if "joined" in message:
            self.join(connection, connection.ranks[message["joined"]])
        if "first_failure" in message:
            self.channel.report_failure(FirstFailure(**message["first_failure"]), source=connection)
        if "bye" in message:
            if message["bye"] in connection.joined:
                self.channel.peers.pop(message["bye"], None)
                connection.joined.discard(message["bye"])
            return bool(connection.joined)
        return True

    def greet(self, connection: Connection, endpoint: RankEndpoint) -> bool:
        """Answer a hello, and return whether the connection goes on."""
        answer = self.admit(endpoint)
        if "welcome" in answer:
            connection.ranks[endpoint.rank] = endpoint
        self.channel.loop.send(connection, {"to": [endpoint.rank, endpoint.pid], **answer})
        return bool(connection.ranks)

    def admit(self, endpoint: RankEndpoint) -> Message:
        """Return the answer to a hello: a welcome, the first failure, or what runs here instead."""
        channel = self.channel
        refusal, failure = channel.admission.admit(endpoint)
        if refusal:
            return {"other_run": refusal}
        if failure:
            channel.report_failure(failure)
        if channel.first_failure and endpoint.world_size:
            channel.admission.arrived.add(endpoint.rank)
            return {"first_failure": asdict(channel.first_failure)}
        return {"welcome": True}

    def join(self, connection: Connection, endpoint: RankEndpoint) -> None:
        """Count a rank from now on, and send it the failure that it has missed.

        A rank whose node's first rank has ended may come on a connection of its own before that one's goodbye.
        """
        channel = self.channel
        previous = self.connections.get(endpoint.rank)
        if previous and previous is not connection:
            previous.joined.discard(endpoint.rank)
        self.connections[endpoint.rank] = connection
        connection.joined.add(endpoint.rank)
        channel.peers[endpoint.rank] = endpoint
        channel.admission.arrived.add(endpoint.rank)
        if channel.first_failure:
            channel.loop.send(connection, {"first_failure": asdict(channel.first_failure)})

    def lose(self, connection: Connection, reason: str) -> None:
        """Report the node of a lost connection whose ranks had joined."""
        channel = self.channel
        for rank in connection.joined:
            channel.peers.pop(rank, None)
        if connection.joined and reason and not channel.closed.is_set():
            channel.report_lost(connection.ranks[min(connection.joined)], reason)


def raise_file_limit(wanted: int) -> None:
    """Raise the limit of open files as far as it is allowed (setrlimit(2)); print where it is too low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    if most != resource.RLIM_INFINITY and most < wanted:
        log(
            f"warning: ulimit -n: {most} open files are too few for the connections of the job's nodes. Raise it to"
            f" {wanted} on rank 0's node (ulimit -Hn, LimitNOFILE)."
        )


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
