"""A node's ranks share one connection to rank 0, and go on when their first rank ends."""

from __future__ import annotations

import socket
import time

import pytest
from msgspec.structs import asdict, replace

from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.channel_server import NODE_LOST_CODE, relay_address
from entrypoint.supervise.failure_channel import FailureChannel, Rank0
from entrypoint.supervise.wire import Session, receive, shake_hands
from tests.entrypoint.supervise.channels import eventually, have_joined, open_channel, stranger
from tests.net import free_port

pytestmark = pytest.mark.seconds

KEY = Access(lambda: b"the key of this job")


def open_job(nodes: int, ranks: int, token: str = "7.0") -> list[FailureChannel]:
    """Open the channels of a job, each node's first rank last."""
    port, rendezvous_port = free_port(), free_port()
    channels = {
        rank: open_channel(
            rank,
            port,
            token,
            rendezvous_port=rendezvous_port,
            access=KEY,
            node=f"node{rank // ranks}",
            local_rank=rank % ranks,
            shares_connection=True,
            world_size=nodes * ranks,
            pid=rank + 1,
        )
        for rank in reversed(range(nodes * ranks))
    }
    assert have_joined(channels[0], nodes * ranks - 1)
    return [channels[rank] for rank in sorted(channels)]


def close(channels: list[FailureChannel]) -> None:
    for channel in reversed(channels):
        channel.report_exit(0, "")


def test_node_has_one_connection() -> None:
    channels = open_job(3, 4)
    assert all(channel.wait_for_rank0(10, lambda _: None) for channel in channels)
    tcp = [one for one in channels[0].loop.connections if one.socket.family.name != "AF_UNIX"]
    assert sorted(sorted(one.joined) for one in tcp) == [[4, 5, 6, 7], [8, 9, 10, 11]]
    close(channels)


def test_failure_reaches_every_rank_of_every_node() -> None:
    channels = open_job(3, 3)
    failed = FirstFailure(5, "node1", 9, "exit code 9")
    channels[5].report_exit(9, "exit code 9")
    assert eventually(5, lambda: all(channel.first_failure == failed for channel in channels))


def test_lost_rank_of_another_node_is_named() -> None:
    channels = open_job(2, 3)
    loop = channels[5].loop
    for connection in list(loop.connections):  # as when its monitor is killed
        channels[5].closed.set()
        loop.close(connection)
    lost = FirstFailure(5, "node1", NODE_LOST_CODE, "its node is lost: its monitor exited")
    assert eventually(5, lambda: channels[0].first_failure == channels[4].first_failure == lost)


def test_lost_first_rank_loses_its_node() -> None:
    channels = open_job(2, 3)
    channels[3].closed.set()
    for connection in list(channels[3].loop.connections):
        channels[3].loop.close(connection)
    assert eventually(5, lambda: all(channel.first_failure for channel in channels if channel is not channels[3]))
    assert channels[0].first_failure is not None
    assert channels[0].first_failure.node in ("node1", "127.0.0.1"), "by which one is noticed first"
    assert channels[0].first_failure.code == NODE_LOST_CODE


def test_ranks_go_on_when_the_first_of_their_node_ends() -> None:
    channels = open_job(2, 3)
    channels[3].report_exit(0, "")
    for connection in list(channels[3].loop.connections):
        channels[3].loop.close(connection)
    assert eventually(10, lambda: sorted(channels[0].peers) == [1, 2, 4, 5])
    assert eventually(10, lambda: 0 in channels[4].peers), "it has a connection of its own now"
    channels[4].report_exit(7, "exit code 7")
    assert eventually(5, lambda: channels[0].first_failure == FirstFailure(4, "node1", 7, "exit code 7"))


def test_rank_without_its_nodes_first_rank_connects_itself(port: int) -> None:
    rank0 = open_channel(0, port, "7.0", access=KEY)
    alone = open_channel(5, port, "7.0", access=KEY, node="node1", local_rank=1, shares_connection=True)
    assert have_joined(rank0, 1)
    alone.report_exit(0, "")


def test_success_of_all_ends_all() -> None:
    channels = open_job(2, 2)
    for rank in (3, 2, 1):
        channels[rank].report_exit(0, "")
    assert eventually(10, lambda: not channels[0].peers)
    channels[0].rank0 = Rank0(others=3)
    assert channels[0].wait_for_others(5, lambda: False, lambda _: None)
    channels[0].report_exit(0, "")
    assert all(channel.first_failure is None for channel in channels)


def test_failure_between_hello_and_joined_reaches_the_rank() -> None:
    channels = open_job(2, 2)
    session = Session()
    with socket.socket(socket.AF_UNIX) as peer:  # the second rank of node1, started again
        peer.connect(relay_address(channels[2].endpoint))
        hello = {"hello": asdict(replace(channels[3].endpoint, local_rank=1))}
        (welcome,) = shake_hands(peer, session, hello, 10)
        channels[1].report_exit(9, "exit code 9")
        assert eventually(5, lambda: channels[2].first_failure is not None)
        peer.sendall(session.encode({"joined": 3}))
        (failure,) = receive(peer, session, time.monotonic() + 10)
    assert "welcome" in welcome
    assert failure["first_failure"]["rank"] == 1


def test_silent_holder_of_the_relays_name_is_passed_over(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr("entrypoint.supervise.channel_client.HANDSHAKE_LIMIT_S", 1)
    endpoint = RankEndpoint(5, "node1", "127.0.0.1", port, "7.0")
    with socket.socket(socket.AF_UNIX) as holder:
        holder.bind(relay_address(endpoint))
        holder.listen()
        rank0 = open_channel(0, port, "7.0", access=KEY)
        other = open_channel(5, port, "7.0", access=KEY, node="node1", local_rank=1, shares_connection=True)
        assert have_joined(rank0, 1)
        other.report_exit(0, "")


def test_goodbye_ends_the_connection_that_said_it(port: int) -> None:
    rank0 = open_channel(0, port, "7.0")
    hello = {"hello": asdict(RankEndpoint(4, "node1", "127.0.0.1", port, "7.0", pid=5))}
    with stranger(port) as (first, one), stranger(port) as (second, two):
        first.sendall(one.encode(hello) + one.encode({"joined": 4}))
        assert have_joined(rank0, 1)
        second.sendall(two.encode(hello) + two.encode({"joined": 4}))
        while not two.decode(second.recv(4096)):  # the answer to the hello
            pass
        first.sendall(one.encode({"bye": 4}))
        while first.recv(4096):
            pass
        assert list(rank0.peers) == [4]
        assert rank0.first_failure is None
    assert eventually(10, lambda: rank0.first_failure is not None), "its second connection counts"
