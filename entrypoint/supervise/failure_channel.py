"""Failure channel between rank monitors: broadcasts the first failure and detects unresponsive nodes.

Rank 0's monitor listens. Each monitor reports how its rank ended. A node has one connection: its first rank's monitor
speaks for the others.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from msgspec import Struct

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, format_ranks
from entrypoint.core.network import LOG_INTERVAL_S, try_listen
from entrypoint.core.process import start_thread
from entrypoint.supervise.access import Access, connect_to
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.channel_client import ChannelClient
from entrypoint.supervise.channel_server import (
    ChannelServer,
    ChannelState,
    NodeRelay,
    listen_on_node,
    port_address,
    relay_address,
)
from entrypoint.supervise.child import POLL_INTERVAL_S
from entrypoint.supervise.store_door import OTHER_RESTARTS, StoreDoor, StoreRelay

# How long the last messages may take.
DRAIN_LIMIT_S = 2.0


class Rank0(Struct, frozen=True):
    """For whom rank 0 listens, unless it `listens` to nobody: `others`, from `nodes` if each has one connection.

    It listens on its `addresses`, without them on all.
    """

    others: int = 0
    nodes: int = 0
    addresses: tuple[str, ...] = ()
    listens: bool = True


class StorePlace(Struct, frozen=True):
    """Where the ranks' programs meet: each at its monitor's socket for `programs`, monitors at rank 0's `port`.

    A port that `is_derived` comes from the job's id: then no rank starts without rank 0.
    """

    programs: socket.socket
    port: int
    timeout_s: float
    is_derived: bool = False


class FailureChannel(ChannelState):
    """Connects the monitors in background threads, and the programs with the store of rank 0."""

    def __init__(
        self,
        endpoint: RankEndpoint,
        timeout_s: float,
        access: Access | None = None,
        store: StorePlace | None = None,
        rank0: Rank0 | None = None,
    ) -> None:
        super().__init__(endpoint, timeout_s, access)
        self.store, self.door = store, StoreDoor(self.loop, tell=lambda: self.report_no_store(OTHER_RESTARTS))
        self.waits_for_rank0 = store is not None and store.is_derived
        self.rank0 = rank0 or Rank0()
        self.next_log_s = LOG_INTERVAL_S
        self.listens = self.rank0.listens and endpoint.rank == 0

    def start(self) -> None:
        """Listen on rank 0, else connect to it; raises `UserError` if a port of rank 0 is taken."""
        speaks = self.endpoint.local_rank == 0 and self.endpoint.shares_connection
        on_node = listen_on_node(relay_address(self.endpoint)) if speaks else None
        if self.listens:
            self.serve(on_node)
            return
        relay = NodeRelay(self) if on_node else None
        if on_node and relay:
            self.loop.listen(on_node, partial(self.access.welcome, relay))
        if self.store:
            address = self.endpoint.host, self.store.port
            connect = partial(
                connect_to, address, port_address(self.store.port, "store") if self.access.own_user_only else ""
            )
            store = StoreRelay(self.loop, self.access, self.store.timeout_s, connect, self.report_no_store)
            self.loop.listen(self.store.programs, store.welcome)
            if self.waits_for_rank0 and self.endpoint.local_rank == 0:  # no program starts before
                start_thread(store.find_store)
        uses_relay = self.endpoint.shares_connection and not speaks
        client = ChannelClient(self, relay, uses_relay=uses_relay, warns=not self.waits_for_rank0)
        start_thread(client.connect)

    def serve(self, on_node: socket.socket | None) -> None:
        """Listen to the other nodes, and on a socket of this node if it has one."""
        server, listening = ChannelServer(self), self.listen(self.endpoint.port, port_address(self.endpoint.port))
        if not listening and self.waits_for_rank0:
            raise self.port_error(self.endpoint.port)
        if self.store:
            self.serve_store(self.store)
        if not listening:  # the job runs without a failure channel
            log(f"warning: no failure channel: port {self.endpoint.port} is taken on this node")
        else:
            server.listen(listening, (self.rank0.nodes or self.rank0.others) + (self.rank0.others if self.store else 0))
        if on_node:
            self.loop.listen(on_node, partial(self.access.welcome, server))
        self.connected.set()

    def listen(self, port: int, address: str) -> list[socket.socket]:
        """Listen on a port, or on the socket in its place for a job on one node; return none if it is taken."""
        if not self.access.own_user_only:
            return try_listen(port, self.rank0.addresses)
        return list(filter(None, (listen_on_node(address),)))

    def serve_store(self, store: StorePlace) -> None:
        """Serve the store to this node's program and to the other monitors; raises `UserError` if its port is taken."""
        listening = self.listen(store.port, port_address(store.port, "store"))
        if not listening:
            raise self.port_error(store.port)
        for server in listening:
            self.loop.listen(server, partial(self.access.welcome, self.door))
        self.loop.listen(store.programs, self.door.welcome_program)

    def port_error(self, taken: int) -> UserError:
        """Return the error for a port that another program has."""
        port, origin = self.store.port if self.store else 0, ", from the job's id" if self.waits_for_rank0 else ""
        return UserError(
            f"MASTER_PORT={port}{origin}: port {taken} is taken on this node. Set MASTER_PORT to another port on all"
            " nodes.",
            ExitCode.RENDEZVOUS,
        )

    def wait_for_rank0(
        self, timeout_s: float, log: Callable[[str], None], is_over: Callable[[], bool] = lambda: False
    ) -> bool:
        """Return whether rank 0 has answered, False when `is_over`; raises `UserError` after `timeout_s` without it."""
        start = last_log = time.monotonic()
        rank, where = self.endpoint.rank, self.endpoint.rank0_place
        while not self.connected.wait(POLL_INTERVAL_S):
            if is_over():
                return False
            now = time.monotonic()
            other = f" {self.obstacle}." if self.obstacle else ""
            if now - start >= timeout_s:
                raise UserError(
                    f"rank {rank}: {where}, did not answer within {timeout_s:.0f} s.{other} Check the output of rank 0,"
                    " or increase LAUNCH_RENDEZVOUS_TIMEOUT_S.",
                    ExitCode.RENDEZVOUS,
                )
            if now - last_log >= LOG_INTERVAL_S:
                last_log = now
                waited = f"{now - start:.0f} of {timeout_s:.0f} s"
                log(f"rank {rank} waits for {where} ({waited}){other and '.'}{other}")
        return True

    def report_absent(self, waited_s: float, limit_s: float) -> None:
        """Report the ranks that rank 0 has waited for in vain, after `limit_s` seconds; name them meanwhile.

        Where programs met, but no monitor has come, only the port of the failure channel is closed.
        """
        arrived, others = self.admission.arrived, self.rank0.others
        waits = self.listens and self.store and len(arrived) < others
        if not waits or (self.door.was_opened and not arrived):
            return
        with self.lock:
            missing = format_ranks([rank for rank in range(1, others + 1) if rank not in arrived])
        if waited_s >= limit_s:
            how = (
                f"{missing} did not join within {limit_s:.0f} s. Check their output, or raise"
                " LAUNCH_RENDEZVOUS_TIMEOUT_S."
            )
            self.report_failure(FirstFailure(0, self.endpoint.node, ExitCode.RENDEZVOUS, how, before_start=True))
        elif waited_s >= self.next_log_s:
            self.next_log_s += LOG_INTERVAL_S
            log(f"waiting for {missing} ({waited_s:.0f} of {limit_s:.0f} s)")

    def report_no_store(self, why: str) -> None:
        """Report why ranks cannot meet, or that rank 0's store did not answer: torch would try for half an hour."""
        limit_s = self.store.timeout_s if self.store else 0
        how = why or (
            f"rank 0 at {self.endpoint.host} did not answer within {limit_s:.0f} s. Check its output, MASTER_ADDR and"
            " MASTER_PORT, or raise LAUNCH_RENDEZVOUS_TIMEOUT_S."
        )
        self.report_failure(
            FirstFailure(self.endpoint.rank, self.endpoint.node, ExitCode.RENDEZVOUS, how, before_start=True)
        )

    def wait_for_others(self, limit_s: float, is_over: Callable[[], bool], log: Callable[[str], None]) -> bool:
        """Wait until all others know how this rank ended, and return whether they do.

        After a success rank 0 also waits for their own ends, because one may fail. Another rank waits for rank 0, and
        for the ranks of its node that it speaks for.
        """
        start = last_log = time.monotonic()
        while not is_over():
            now = time.monotonic()
            with self.lock:
                missing = self.rank0.others - len(self.admission.arrived)
                running = bool(self.peers) if self.listens else bool(self.node_peers)
            came = missing <= 0 if self.listens else self.connected.is_set()
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
