"""The other ranks' side of the failure channel: finds rank 0, directly or through the node's first rank."""

from __future__ import annotations

import socket
import time

from msgspec.structs import asdict, replace

from entrypoint.core.console import log
from entrypoint.core.errors import printable
from entrypoint.core.network import RETRY_INTERVAL_S
from entrypoint.core.process import start_thread
from entrypoint.supervise.access import connect_on_node, connect_to
from entrypoint.supervise.admission import FirstFailure
from entrypoint.supervise.channel_server import ChannelState, NodeRelay, port_address, relay_address
from entrypoint.supervise.event_loop import HANDSHAKE_LIMIT_S, Connection
from entrypoint.supervise.wire import OTHER_KEY, Message, Session, WireError, shake_hands

# After this time without the node's first rank, a rank connects to rank 0 itself: it may be alone in its container.
RELAY_WAIT_S = 3.0
# A rank that does not need rank 0's port starts meanwhile; only a failure of another rank would be noticed later.
WARN_AFTER_S = 30.0


class ChannelClient:
    """Connects to rank 0's monitor, and handles its messages; it `warns` where nothing else waits for rank 0."""

    def __init__(self, channel: ChannelState, relay: NodeRelay | None, *, uses_relay: bool, warns: bool) -> None:
        self.channel, self.relay, self.uses_relay, self.warns = channel, relay, uses_relay, warns
        self.started = time.monotonic()
        self.rank0_ended = False

    def connect(self) -> None:
        """Connect to rank 0's monitor, retrying until it listens; runs in a thread of its own."""
        channel, rank = self.channel, self.channel.endpoint.rank
        while not (answered := self.find_rank0()):
            if channel.closed.is_set():
                return
            if self.warns and time.monotonic() - self.started > WARN_AFTER_S:
                self.warns = False
                other = f" {channel.obstacle}." if channel.obstacle else ""
                missing = f"{channel.endpoint.rank0_place}, did not answer.{other}"
                log(f"warning: rank {rank} has no failure channel: {missing}")
            time.sleep(RETRY_INTERVAL_S)
        connection, messages = answered
        with channel.lock:
            connection.ranks[0] = replace(channel.endpoint, rank=0, node=channel.endpoint.host)
            connection.joined.add(0)
            channel.peers[0] = connection.ranks[0]
            message: Message = {"joined": rank}
            if channel.first_failure:
                message["first_failure"] = asdict(channel.first_failure)
            if channel.closed.is_set():
                message["bye"] = rank
            channel.loop.add(connection)
            channel.loop.send(connection, message)
            if self.relay:
                self.relay.connect(connection)
            channel.loop.dispatch(connection, messages)
        channel.connected.set()

    def find_rank0(self) -> tuple[Connection, list[Message]] | None:
        """Return a connection to this run's rank 0 and what it has sent; None if it is not found."""
        endpoint = self.channel.endpoint
        if self.uses_relay:
            peer = connect_on_node(relay_address(endpoint))
            if peer and (answered := self.handshake(peer, Session(), is_relay=True)):
                return answered
            if time.monotonic() - self.started < RELAY_WAIT_S:
                return None
        key = self.channel.access.read_key()
        if self.channel.access.awaits(key):
            self.channel.obstacle = "Rank 0 has not written the job's key yet"
            return None
        name = port_address(endpoint.port) if self.channel.access.own_user_only else ""
        peer = connect_to((endpoint.host, endpoint.port), name)
        return self.handshake(peer, Session(key)) if peer else None

    def handshake(
        self, peer: socket.socket, session: Session, *, is_relay: bool = False
    ) -> tuple[Connection, list[Message]] | None:
        """Send a hello and wait for the answer; return None, with the connection closed, if another run answers.

        A relay answers when it has found rank 0, and sends heartbeats until then.
        """
        hello = {"hello": asdict(self.channel.endpoint)}
        heartbeat_s = max(HANDSHAKE_LIMIT_S, 4 * self.channel.loop.interval_s) if is_relay else 0.0
        try:
            messages = shake_hands(peer, session, hello, HANDSHAKE_LIMIT_S, heartbeat_s)
            if self.take_up(messages.pop(0)):
                return Connection(peer, session, self), messages
        except WireError as error:
            self.note_obstacle(str(error))
        except TimeoutError:
            pass  # a busy node, which is tried again
        except (OSError, ValueError, KeyError, TypeError):
            if session.key and session.is_open:  # it has closed the connection in place of an answer
                self.note_obstacle(OTHER_KEY)
        peer.close()
        return None

    def note_obstacle(self, reason: str) -> None:
        """Note why what answers at rank 0's port is not taken for rank 0."""
        self.channel.obstacle = f"What answers there does not take part: {reason}"

    def take_up(self, answer: Message) -> bool:
        """Take up rank 0's answer to the hello, and return whether it is this run's."""
        channel = self.channel
        if "other_run" in answer:
            channel.obstacle = f"Another run answers there: {printable(answer['other_run'])}"
            return False
        if "first_failure" in answer:
            channel.report_failure(FirstFailure(**answer["first_failure"]))
            return True
        return bool(answer["welcome"])

    def handle(self, connection: Connection, message: Message) -> bool:
        """Handle a message of rank 0, and return whether more follow."""
        if "to" in message and self.relay:
            self.relay.route(message)
        if "first_failure" in message:
            self.channel.report_failure(FirstFailure(**message["first_failure"]), source=connection)
        self.rank0_ended |= message.get("bye") == 0
        return "bye" not in message

    def lose(self, connection: Connection, reason: str) -> None:
        """Report that rank 0's node, or this node's first rank, is lost; go on without the first rank if it ends."""
        channel = self.channel
        channel.peers.pop(0, None)
        if self.relay:
            self.relay.disconnect(rank0_ended=self.rank0_ended)
        if reason and not channel.closed.is_set():
            channel.report_lost(connection.ranks[0], reason)
        elif not (reason or self.rank0_ended or channel.closed.is_set() or channel.first_failure):
            self.uses_relay = False
            start_thread(self.connect)
