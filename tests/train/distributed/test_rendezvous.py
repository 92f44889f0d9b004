"""Who is named when an exchange between ranks fails, and how long a start waits for whom."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from entrypoint.core.errors import ExitCode, PeerLostError
from tests.conftest import refusal
from train.distributed.peers import (
    Peer,
    connect_store,
    describe_lost_peer,
    is_reachable,
    local_peer,
    translate_collective_errors,
    wait_for_all_ranks,
)
from train.preemption import HANDLED, PREEMPT_WARNING, STOP_CONTROLLER

pytestmark = [pytest.mark.launch, pytest.mark.versions]

HERE = (Peer(0, "node0", "10.0.0.1"), Peer(1, "node0", "10.0.0.1"))
THERE = (Peer(2, "node1", "10.0.0.2"), Peer(3, "node1", "10.0.0.2"))
FURTHER = (Peer(4, "node2", "10.0.0.3"),)
CLOSED = "[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.0.0.2]:1416"
SILENT = "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 10000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("text", "silent", "said"),
    [
        (CLOSED, set(), "lost ranks 2, 3 on node1 (10.0.0.2) while exchanging data: Connection closed by peer"),
        (SILENT, {"10.0.0.3"}, "lost rank 4 on node2 (10.0.0.3) while exchanging data: Timed out waiting 10000ms"),
        (SILENT, {"10.0.0.2", "10.0.0.3"}, "lost ranks 2, 3 on node1 (10.0.0.2) and rank 4 on node2 (10.0.0.3)"),
        (SILENT, set(), "lost another rank while exchanging data: Timed out"),
        (CLOSED.replace("0.0.2", "0.0.1"), set(), "lost another rank while exchanging data: Connection closed"),
    ],
)
def test_describe_lost_peer_by_address_or_silence(text: str, silent: set[str], said: str) -> None:
    reported = describe_lost_peer(text, 0, HERE + THERE + FURTHER, lambda address: address not in silent)
    assert reported.startswith(f"rank 0: {said}")


@pytest.fixture
def signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_translate_collective_errors_only_collective_ones() -> None:
    with (
        pytest.raises(PeerLostError, match="rank 0: lost ranks 2, 3 on node1") as error,
        translate_collective_errors(0, HERE + THERE),
    ):
        raise RuntimeError(CLOSED)
    assert error.value.code == ExitCode.RANK_FAILED
    os.kill(os.getpid(), signal.SIGTERM)  # with which a launcher ends all ranks when it has seen one fail
    with pytest.raises(RuntimeError, match="shapes"), translate_collective_errors(0, HERE):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_is_reachable_live_node() -> None:
    assert is_reachable("127.0.0.1")
    assert local_peer(3) == Peer(3, socket.gethostname(), "127.0.0.1")


def test_wait_for_all_ranks_names_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    refusal(
        wait_for_all_ranks, 0, 3, 1.0, match="rank 0 of 3: ranks 1, 2 did not join within 1 s", code=ExitCode.RENDEZVOUS
    )
    assert not dist.is_initialized()


def test_rank_that_a_warning_stopped_is_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    stores = [connect_store(rank, timedelta(seconds=9)) for rank in (0, 1)]
    monkeypatch.setattr("train.distributed.peers.connect_store", lambda rank, _: stores[rank])
    monkeypatch.setattr(STOP_CONTROLLER, "number", PREEMPT_WARNING)
    refusal(wait_for_all_ranks, 0, 2, 9.0, match="before the first step", code=ExitCode.PREEMPTED)
    monkeypatch.setattr(STOP_CONTROLLER, "number", None)
    refusal(wait_for_all_ranks, 1, 2, 9.0, match="before the first step", code=ExitCode.PREEMPTED)


def test_store_of_one_node_listens_on_loopback(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    store = connect_store(0, timedelta(seconds=30))
    store.set("key", "value")
    assert connect_store(1, timedelta(seconds=30)).get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):  # another address of this machine
        socket.create_connection(("127.0.0.2", port), timeout=5)
