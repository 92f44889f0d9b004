"""Rank 0's side of the failure channel: admits the other ranks, and notices when one is lost."""

from __future__ import annotations

import resource
import socket
from functools import partial

from msgspec.structs import asdict

from entrypoint.core.console import log
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.channel_state import ChannelState
from entrypoint.supervise.event_loop import Connection
from entrypoint.supervise.wire import Message

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
