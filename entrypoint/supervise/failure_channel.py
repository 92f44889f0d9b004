"""Failure channel between rank monitors: broadcasts the first failure and detects unresponsive nodes.

Rank 0's monitor listens, and sends the rendezvous port to the others. Each monitor reports how its rank ended. A node
has one connection: its first rank's monitor speaks for the others.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from msgspec.structs import asdict, replace

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import LOG_INTERVAL_S, hold_port, lock_port, try_listen
from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import Admission, FirstFailure, RankEndpoint
from entrypoint.supervise.channel_client import ChannelClient
from entrypoint.supervise.channel_server import ChannelServer
from entrypoint.supervise.child import POLL_INTERVAL_S
from entrypoint.supervise.event_loop import Connection, EventLoop
from entrypoint.supervise.node_relay import NodeRelay, listen_on_node, port_address, relay_address

# The exit code of a first failure on a node that no longer responds.
NODE_LOST_CODE = -1
# The longest description in characters: a message is one line of the wire.
MAX_HOW = 4000
# How long the last messages may take.
DRAIN_LIMIT_S = 2.0


class FailureChannel:
    """Connects the monitors in background threads; `first_failure` is set when a rank fails or a node is lost.

    Rank 0 takes the first free one of `ports` for the rendezvous, and sends it to the others. Without `ports`, the
    launcher sets the rendezvous port. Rank 0 expects `others` to connect, from `nodes` if each has one connection. It
    listens on its `addresses`, without them on all. `peers` are the ranks that have joined rank 0, or rank 0 itself;
    `node_peers` those that this monitor speaks for.
    """

    def __init__(
        self,
        endpoint: RankEndpoint,
        timeout_s: float,
        ports: tuple[int, ...] = (),
        others: int = 0,
        access: Access | None = None,
        addresses: tuple[str, ...] = (),
        nodes: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self.addresses = addresses
        self.nodes = nodes
        self.ports = ports
        self.others = others
        self.access = access or Access()
        self.loop = EventLoop(timeout_s, endpoint.world_size)
        self.lock = self.loop.lock
        self.listens = endpoint.rank == 0
        self.port = 0
        self.held_port: socket.socket | None = None
        self.port_lock: socket.socket | None = None
        self.port_known = threading.Event()
        self.first_failure: FirstFailure | None = None
        self.peers: dict[int, RankEndpoint] = {}
        self.node_peers: set[int] = set()
        self.admission = Admission(endpoint)
        self.other_run = self.obstacle = ""
        self.closed = threading.Event()

    def start(self) -> None:
        """Listen on rank 0, else connect to it; raises `UserError` if no rendezvous port is free."""
        speaks = self.endpoint.local_rank == 0 and self.endpoint.shares_connection
        on_node = listen_on_node(relay_address(self.endpoint)) if speaks else None
        if not self.listens:
            relay = NodeRelay(self) if on_node else None
            if on_node and relay:
                self.loop.listen(on_node, relay.welcome)
            uses_relay = self.endpoint.shares_connection and not speaks
            client = ChannelClient(self, relay, uses_relay=uses_relay)
            threading.Thread(target=client.connect, daemon=True).start()
            return
        server, listening = ChannelServer(self), self.take_ports()
        if listening:
            server.listen(listening, self.nodes or self.others)
        elif self.ports:  # without `ports` the job runs without a failure channel
            raise UserError(ports_taken_message(self.ports), ExitCode.RENDEZVOUS)
        else:
            log(f"warning: no failure channel: none of {ports_text(self.endpoint.ports)} is free on this node")
        if on_node:
            self.loop.listen(on_node, server.welcome_local)
        self.port_known.set()

    def take_ports(self) -> list[socket.socket]:
        """Listen on the first free port whose rendezvous port is free too, which stays held; none if there is none."""
        ports = zip(self.endpoint.ports, self.ports or self.endpoint.ports, strict=False)
        for monitor_port, port in ports:
            lock = None if self.access.own_user_only else lock_port(monitor_port)
            listening = self.listen_on(monitor_port) if lock or self.access.own_user_only else []
            if listening and self.ports:
                try:
                    self.held_port, self.port = hold_port(port), port
                except OSError:
                    for one in listening:
                        one.close()
                    listening = []
            if listening:
                self.port_lock = lock
                return listening
            if lock:
                lock.close()
        return []

    def listen_on(self, port: int) -> list[socket.socket]:
        """Listen on a port, or on the socket in its place for a job on one node; return none if it is taken."""
        if not self.access.own_user_only:
            return try_listen(port, self.addresses)
        return list(filter(None, (listen_on_node(port_address(port)),)))

    def wait_for_port(
        self, timeout_s: float, log: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
    ) -> int:
        """Return the port that rank 0 takes, 0 when `is_over`; raises `UserError` after `timeout_s` without it."""
        start = last_log = time.monotonic()
        where = self.where
        while not self.port_known.wait(POLL_INTERVAL_S):
            if is_over():
                return 0
            now = time.monotonic()
            other = self.what_answers()
            if now - start >= timeout_s:
                raise UserError(
                    f"rank {self.endpoint.rank}: {where} did not answer within {timeout_s:.0f} s.{other} Check the"
                    " output of rank 0, or increase LAUNCH_RENDEZVOUS_TIMEOUT_S.",
                    ExitCode.RENDEZVOUS,
                )
            if now - last_log >= LOG_INTERVAL_S:
                last_log = now
                waited = f"{now - start:.0f} of {timeout_s:.0f} s"
                log(f"rank {self.endpoint.rank} waits for {where[:-1]} ({waited}){other and '.'}{other}")
        return self.port

    @property
    def where(self) -> str:
        """Where rank 0 is looked for."""
        return f"rank 0 at {printable(self.endpoint.host)}, {ports_text(self.endpoint.ports)},"

    def what_answers(self) -> str:
        """Return a sentence about what answers at rank 0's ports, empty if nothing does."""
        if self.other_run:
            return f" Another run answers there: {printable(self.other_run)}."
        return f" What answers there does not take part: {self.obstacle}." if self.obstacle else ""

    def wait_for_others(self, limit_s: float, is_over: Callable[[], bool], log: Callable[[str], None]) -> bool:
        """Wait until all others know how this rank ended, and return whether they do.

        After a success rank 0 also waits for their own ends, because one may fail. Another rank waits for rank 0, and
        for the ranks of its node that it speaks for.
        """
        start = last_log = time.monotonic()
        while not is_over():
            now = time.monotonic()
            with self.lock:
                missing = self.others - len(self.admission.arrived)
                running = bool(self.peers) if self.listens else bool(self.node_peers)
            came = missing <= 0 if self.listens else self.port_known.is_set()
            if came and (self.first_failure or not running):
                return True
            if not came and now - start >= limit_s:
                return False
            if not came and now - last_log >= LOG_INTERVAL_S:
                last_log = now
                who = "rank 0" if not self.listens else f"{missing} other rank{'s' * (missing > 1)}"
                log(f"rank {self.endpoint.rank} has ended, and waits for {who} ({now - start:.0f} of {limit_s:.0f} s)")
            time.sleep(POLL_INTERVAL_S)
        return False

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

    def report_exit(self, code: int, how: str) -> None:
        """Report how this monitor's own rank ended; on rank 0 this closes the channel."""
        if code:
            self.report_failure(FirstFailure(self.endpoint.rank, self.endpoint.node, code, how))
        with self.lock:
            self.closed.set()  # set before sending "bye": a peer that disconnects after it is not lost
            for connection in list(self.loop.connections):
                if 0 in connection.joined and not self.listens:  # those that this monitor speaks for connect again
                    for rank in self.node_peers:
                        self.loop.send(connection, {"bye": rank})
                if connection.joined:
                    self.loop.send(connection, {"bye": self.endpoint.rank})
        self.loop.drain(DRAIN_LIMIT_S)


def ports_text(ports: tuple[int, ...]) -> str:
    """Return a range of ports as text."""
    return f"ports {ports[0]} to {ports[-1]}"


def ports_taken_message(ports: tuple[int, ...]) -> str:
    """Return the error message for a node without a free rendezvous port."""
    return f"{ports_text(ports)}: no free rendezvous port on this node. Set MASTER_PORT to a free port on all nodes."
