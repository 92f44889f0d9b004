"""Failure channels between ranks of a made-up job."""

from __future__ import annotations

import time
from collections.abc import Callable

from entrypoint.supervise.admission import RankEndpoint
from entrypoint.supervise.failure_channel import FailureChannel
from tests.net import free_port


def open_channel(
    rank: int, ports: tuple[int, ...], token: str = "x", timeout_s: float = 30, rendezvous_ports: tuple[int, ...] = ()
) -> FailureChannel:
    channel = FailureChannel(RankEndpoint(rank, f"node{rank}", "127.0.0.1", ports, token), timeout_s, rendezvous_ports)
    channel.start()
    return channel


def open_channels(count: int, timeout_s: float = 30, tokens: tuple[str, ...] = ()) -> list[FailureChannel]:
    port = free_port()
    tokens = tokens or ("job 7",) * count
    return [open_channel(rank, (port,), tokens[rank], timeout_s) for rank in range(count)]


def eventually(limit_s: float, holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + limit_s
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()


def have_joined(rank0: FailureChannel, count: int) -> bool:
    return eventually(10, lambda: len(rank0.peers) == count)
