"""Names the lost rank when a collective fails, and ends a rank whose collectives would wait for it for ever."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from entrypoint.core.collective_error import is_collective_error, lost_collective
from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, PeerLostError, first_line
from train.distributed.rendezvous import DISCARD_PORT, Peer, format_ranks
from train.preemption import STOP_CONTROLLER

# Seconds for a node to answer a connection, which any live kernel answers at once.
PROBE_TIMEOUT_S = 3.0


# The delay before a rank that lost a peer exits. Why: torchrun's agent reports the rank that exits first, which must be
# the lost peer.
FAILURE_ORDER_DELAY_S = 1.5


@contextmanager
def translate_collective_errors(rank: int, peers: Sequence[Peer]) -> Iterator[None]:
    """Convert a collective's failure into a `PeerLostError` that names the lost node, if that can be known."""
    try:
        yield
    except RuntimeError as error:
        if not is_collective_error(error):
            raise
        STOP_CONTROLLER.ignore()  # this rank exits anyway; a launcher's signal would hide the cause
        delay_exit()
        raise PeerLostError(describe_lost_peer(str(error), rank, peers, is_reachable), lost_collective(error)) from None


def delay_exit() -> None:
    """Let the lost rank end first; by this function's name the launcher knows that this rank ends too."""
    time.sleep(FAILURE_ORDER_DELAY_S)


def describe_lost_peer(text: str, rank: int, peers: Sequence[Peer], is_alive: Callable[[str], bool]) -> str:
    """Return which rank is lost: by the address in Gloo's message, or by the nodes that do not answer."""
    cause = text.splitlines()[0].split("] ")[-1] if text else "no reason given"
    mine = next((peer for peer in peers if peer.rank == rank), None)
    others = [peer for peer in peers if mine is None or peer.node != mine.node]
    named_addresses = set(re.findall(r"\[([0-9A-Fa-f.:]+)\]:\d+", text))
    lost = [peer for peer in others if peer.address in named_addresses]
    if not lost:
        silent_addresses = {address for address in {peer.address for peer in others} if not is_alive(address)}
        lost = [peer for peer in others if peer.address in silent_addresses]
    description = " and ".join(peers_by_node(lost)) if lost else "another rank"
    return f"rank {rank}: lost {description} while exchanging data: {cause}"


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


# oneCCL's and MPI's collectives wait for ever for a rank that is stopped or gone.
UNTIMED_BACKENDS = ("ccl", "mpi")
INTERVAL_S = 2.0
# How long a rank waits at its end for the others to notice.
STOP_LIMIT_S = 3.0


def new_gloo_group(timeout_s: float) -> dist.ProcessGroup:
    """Return a Gloo group of all ranks besides the backend's; all ranks must call this."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))


class PeerWatch:
    """A thread of each rank that meets the others every two seconds, over a Gloo group of its own.

    If that fails, because a rank is stopped or gone, the thread reports it and ends the process with code 5. The main
    thread may wait in a collective for ever. The first rank that stops its watch ends those of all others.
    """

    def __init__(self, rank: int, timeout_s: float) -> None:
        self.rank, self.timeout_s = rank, timeout_s
        self.stopped = threading.Event()
        self.group = new_gloo_group(timeout_s)
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """Tell the other ranks that this one is about to end, so that none takes it for lost."""
        self.stopped.set()
        self.thread.join(INTERVAL_S + STOP_LIMIT_S)

    def run(self) -> None:
        """Meet the others until one of them stops; end this process if that fails."""
        ends = torch.zeros(1, dtype=torch.int32)
        while not int(ends.item()):
            self.stopped.wait(INTERVAL_S)
            ends.fill_(int(self.stopped.is_set()))
            try:
                dist.all_reduce(ends, dist.ReduceOp.MAX, group=self.group)
            except RuntimeError as error:
                if self.stopped.is_set():
                    return
                message = f"rank {self.rank}: another rank does not answer, or has ended ({first_line(error)})"
                report_error(PeerLostError(message, {"called": "a collective", "how": "timeout"}))
                os._exit(ExitCode.RANK_FAILED)  # without Python's own end
