"""The failure channel of a large job: how fast it joins, what it costs idle, how fast a failure spreads.

Claim: 16,384 ranks on 2,048 nodes join within 10 s, take less than 5 % of a core of rank 0, and spread a failure in
less than 1 s. Claim: no node is called lost by mistake, on busy cores either.
Rank 0's monitor is the real one, in a process of its own. The other nodes are connections over loopback from other
processes.
The benchmark prints a table and asserts nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import socket
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

from msgspec.structs import asdict

from benchmarks.record import parse_options, recording
from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.event_loop import Connection, EventLoop
from entrypoint.supervise.failure_channel import FailureChannel
from entrypoint.supervise.wire import Message, Session

KEY = b"the key of a benchmark"
TIMEOUT_S = 60.0
SIMULATORS = 2


class SimulatedNode:
    """A node's connection: joins with each rank that is admitted, and notes when a failure comes."""

    def __init__(self, loop: EventLoop) -> None:
        self.loop = loop
        self.failed_at = 0.0
        self.lost = ""

    def handle(self, connection: Connection, message: Message) -> bool:
        if "to" in message:
            rank = message["to"][0]
            connection.joined.add(rank)
            self.loop.send(connection, {"joined": rank})
        if "first_failure" in message:
            self.failed_at = time.time()
        return "bye" not in message

    def lose(self, _: Connection, reason: str) -> None:
        self.lost = reason


def simulate(port: int, nodes: range, ranks: int, world_size: int, pipe: Pipe) -> None:
    """Connect the nodes, then answer what is asked: when the last one knew of a failure, and how many were lost."""
    raise_limit()
    loop = EventLoop(TIMEOUT_S, world_size)
    simulated = []
    for node in nodes:
        peer = connect(port)
        session = Session(KEY)
        peer.sendall(session.greeting())
        while not session.is_open:
            session.decode(peer.recv(4096))
        one = SimulatedNode(loop)
        connection = Connection(peer, session, one)
        loop.add(connection)
        for rank in range(max(1, node * ranks), (node + 1) * ranks):
            loop.send(connection, {"hello": asdict(endpoint(rank, f"node{node}", port, world_size))})
        simulated.append(one)
    while True:
        question = pipe.recv()
        if question == "end":
            os._exit(0)
        pipe.send((max(one.failed_at for one in simulated), sum(bool(one.lost) for one in simulated),
                   sum(not one.failed_at for one in simulated)))  # fmt: skip


def connect(port: int) -> socket.socket:
    """Connect to rank 0; its queue of connections may be full for a moment."""
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except OSError:
            time.sleep(0.05)


def endpoint(rank: int, node: str, port: int, world_size: int) -> RankEndpoint:
    return RankEndpoint(rank, node, "127.0.0.1", (port,), "job 7", world_size, "0.2", pid=1)


def raise_limit() -> None:
    """Allow as many open files as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lead(port: int, world_size: int, expected: int, idle_s: float, pipe: Pipe) -> None:
    """Be rank 0's monitor: print how long the expected others took, what idling cost, and spread a failure."""
    channel = FailureChannel(
        endpoint(0, "node0", port, world_size), TIMEOUT_S, others=world_size - 1, access=Access(lambda: KEY)
    )
    channel.start()
    pipe.send("listens")
    start, cpu = time.monotonic(), time.process_time()
    while len(channel.peers) < expected and time.monotonic() - start < 120:
        time.sleep(0.02)
    joined = {"joined": len(channel.peers), "join_s": time.monotonic() - start,
              "join_cpu_s": time.process_time() - cpu}  # fmt: skip
    time.sleep(2)
    start, cpu = time.monotonic(), time.process_time()
    time.sleep(idle_s)
    idle = (time.process_time() - cpu) / (time.monotonic() - start)
    failure = asdict(channel.first_failure) if channel.first_failure else None
    failed_at = time.time()
    channel.report_failure(FirstFailure(5, "node0", 9, "exit code 9"))
    pipe.send({**joined, "idle_share": idle, "false_loss": failure, "failed_at": failed_at})
    pipe.recv()
    os._exit(0)


def measure(nodes: int, ranks: int, idle_s: float) -> dict[str, Any]:
    """Return what a job of this size costs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    world_size = nodes * ranks
    context = multiprocessing.get_context("fork")
    own, others = context.Pipe()
    context.Process(target=lead, args=(port, world_size, world_size - ranks, idle_s, others), daemon=True).start()
    own.recv()
    pipes = []
    for part in range(SIMULATORS):
        pipe, end = context.Pipe()
        members = range(1 + part, nodes, SIMULATORS)
        context.Process(target=simulate, args=(port, members, ranks, world_size, end), daemon=True).start()
        pipes.append(pipe)
    result = dict(own.recv())
    time.sleep(3)
    for pipe in pipes:
        pipe.send("failure")
    answers = [pipe.recv() for pipe in pipes]
    for pipe in (own, *pipes):
        pipe.send("end")
    spread_s = max(at for at, *_ in answers) - result["failed_at"]
    lost = sum(lost + unheard for _, lost, unheard in answers) + bool(result["false_loss"])
    return {**result, "spread_s": spread_s, "lost": lost + world_size - ranks - result["joined"]}


def main() -> None:
    """Print a table for each thing that is measured, with a row for each size."""
    parser = argparse.ArgumentParser(prog="make bench-channel", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 128, 512, 2048])
    parser.add_argument("--ranks", type=int, default=8, help="ranks on a node")
    parser.add_argument("--idle-s", type=float, default=20, help="seconds to idle in each round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parse_options(parser)
    with recording("channel", args, args.rounds) as record:
        joins, shares = record.table("all ranks join", "s"), record.table("idle, share of a core", "%")
        spreads, losses = record.table("a failure reaches all nodes", "s"), record.table("ranks lost by mistake", "")
        for _ in range(args.rounds):
            for nodes in args.nodes:
                one = measure(nodes, args.ranks, args.idle_s)
                name = f"{nodes * args.ranks:,} ranks on {nodes:,} nodes"
                joins.add(name, one["join_s"])
                shares.add(name, 100 * one["idle_share"])
                spreads.add(name, one["spread_s"])
                losses.add(name, one["lost"])
        for table in (joins, shares, spreads, losses):
            print(table.text(), flush=True)


if __name__ == "__main__":
    main()
