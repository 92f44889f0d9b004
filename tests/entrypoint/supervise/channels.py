"""Failure channels between ranks of a made-up job."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from entrypoint.supervise.access import Access
from entrypoint.supervise.admission import RankEndpoint
from entrypoint.supervise.failure_channel import FailureChannel, StorePlace
from entrypoint.supervise.store_door import listen_on_loopback
from entrypoint.supervise.wire import Session
from tests.net import free_port


def open_channel(
    rank: int,
    port: int,
    token: str = "x",
    timeout_s: float = 30,
    rendezvous_port: int = 0,
    access: Access | None = None,
    **more: Any,
) -> FailureChannel:
    endpoint = replace(RankEndpoint(rank, f"node{rank}", "127.0.0.1", port, token), **more)
    store = derived_store(rendezvous_port) if rendezvous_port else None
    channel = FailureChannel(endpoint, timeout_s, access, store)
    channel.start()
    return channel


def derived_store(port: int) -> StorePlace:
    """Return where ranks meet by a port from the job's id."""
    return StorePlace(listen_on_loopback(), port, 30, is_derived=True)


@contextmanager
def stranger(port: int, key: bytes = b"") -> Iterator[tuple[socket.socket, Session]]:
    """Connect to rank 0's monitor, and exchange the first lines with it."""
    session = Session(key)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(session.greeting())
        while not session.is_open:
            assert session.decode(peer.recv(4096)) == []
        yield peer, session


def open_channels(count: int, timeout_s: float = 30, tokens: tuple[str, ...] = ()) -> list[FailureChannel]:
    port = free_port()
    tokens = tokens or ("job 7",) * count
    return [open_channel(rank, port, tokens[rank], timeout_s) for rank in range(count)]


def eventually(limit_s: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def have_joined(rank0: FailureChannel, count: int) -> bool:
    return eventually(10, lambda: len(rank0.peers) == count)
