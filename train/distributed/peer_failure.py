"""Identifies the lost rank when a collective fails."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

from torch.distributed.distributed_c10d import Store

from entrypoint.core.collective_error import is_collective_error
from entrypoint.core.errors import PeerLostError
from train.distributed.rendezvous import DISCARD_PORT, Peer, format_ranks
from train.distributed.unreported_ranks import call_roll, locate_missing, missing_text
from train.preemption import STOP_CONTROLLER

# Seconds for a node to answer a connection, which any live kernel answers at once.
PROBE_TIMEOUT_S = 3.0


# The delay before a rank that lost a peer exits. Why: torchrun's agent reports the rank that exits first, which must be
# the lost peer.
FAILURE_ORDER_DELAY_S = 1.5


@contextmanager
def translate_collective_errors(rank: int, peers: Sequence[Peer], store: Store | None = None) -> Iterator[None]:
    """Convert a collective's failure into a `PeerLostError` that names the lost rank or node, and where it is."""
    try:
        yield
    except RuntimeError as error:
        if not is_collective_error(error):
            raise
        STOP_CONTROLLER.ignore()  # this rank exits anyway; a launcher's signal would hide the cause
        ends_at = time.monotonic() + FAILURE_ORDER_DELAY_S
        silent = call_roll(store, rank, [peer.rank for peer in peers]) if store else None
        time.sleep(max(0.0, ends_at - time.monotonic()))
        missing = locate_missing(rank, peers, silent)
        raise PeerLostError(describe_lost_peer(str(error), rank, peers, is_reachable, missing)) from None


def describe_lost_peer(
    text: str,
    rank: int,
    peers: Sequence[Peer],
    is_alive: Callable[[str], bool],
    missing: Mapping[int, str] = MappingProxyType({}),
) -> str:
    """Return which rank is lost: by the address in Gloo's message, by the nodes that do not answer, else by `missing`.

    `missing` says where ranks are that are missing from the exchange.
    """
    cause = text.splitlines()[0].split("] ")[-1] if text else "no reason given"
    mine = next((peer for peer in peers if peer.rank == rank), None)
    others = [peer for peer in peers if mine is None or peer.node != mine.node]
    named_addresses = set(re.findall(r"\[([0-9A-Fa-f.:]+)\]:\d+", text))
    lost = [peer for peer in others if peer.address in named_addresses]
    if not lost:
        silent_addresses = {address for address in {peer.address for peer in others} if not is_alive(address)}
        lost = [peer for peer in others if peer.address in silent_addresses]
    lost = lost or [peer for peer in peers if peer.rank in missing]
    description = " and ".join(peers_by_node(lost)) if lost else "another rank"
    return f"rank {rank}: lost {description} while exchanging data: {cause}{missing_text(missing)}"


def peers_by_node(peers: Sequence[Peer]) -> list[str]:
    """Return a text per node with its ranks: `rank 1 on node1 (10.0.0.2)`."""
    nodes = sorted({(peer.node, peer.address) for peer in peers})
    return [
        f"{format_ranks([peer.rank for peer in peers if peer.node == node])} on {node} ({address})"
        for node, address in nodes
    ]


def is_reachable(address: str) -> bool:
    """Return whether a node answers: it accepts or rejects a connection instead of timing out."""
    try:
        socket.create_connection((address, DISCARD_PORT), timeout=PROBE_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return True
