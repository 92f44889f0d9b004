"""The ranks of a job for each other: they meet through a store, and name the one that is lost.

A collective that fails names the lost rank.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from entrypoint.core.collective_error import is_collective_error, lost_collective
from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, PeerLostError, UserError, format_ranks
from entrypoint.core.network import LOG_INTERVAL_S, address_for_route, interface_address
from entrypoint.rank.environment import RANK0_HOST_VAR
from train.preemption import PREEMPT_WARNING, STOP_CONTROLLER, Preempted

# The port of the discard service. No process listens there, so a live node refuses the connection.
DISCARD_PORT = 9
PAUSE_S = 0.05
# The key that says that a rank has left before all had come.
LEFT = "left"
LOOPBACK = {"127.0.0.1": socket.AF_INET, "localhost": socket.AF_INET, "::1": socket.AF_INET6}


@dataclass(frozen=True)
class Peer:
    """A rank, the name of its node and its address in the job's network."""

    rank: int
    node: str
    address: str


def local_peer(rank: int) -> Peer:
    """Return this process as a peer of the others."""
    # On the master, its host name may resolve to a loopback address. The interface has the address in the job's
    # network.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = os.environ.get(RANK0_HOST_VAR) or os.environ.get("MASTER_ADDR", "127.0.0.1")
    address = interface_address(interface) or address_for_route(master) or "127.0.0.1"
    return Peer(rank, socket.gethostname(), address)


def wait_for_all_ranks(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the store when all ranks have joined it; rank 0 logs the missing ranks meanwhile.

    RANK, WORLD_SIZE and MASTER_* determine the store.
    Raises `UserError` if a rank has not joined within `timeout_s` seconds, and where one that got SIGUSR1 has left.
    Why not the timeout of the process group: a later failure must be reported sooner.
    """
    store = connect_store(rank, timedelta(seconds=timeout_s))
    store.set(f"here/{rank}", "")
    started = logged = time.monotonic()
    missing = list(range(world_size))
    while missing := [peer for peer in missing if not store.check([f"here/{peer}"])]:
        now, missing_text = time.monotonic(), format_ranks(missing)
        if STOP_CONTROLLER.number == PREEMPT_WARNING:
            store.set(LEFT, "")
        if store.check([LEFT]):
            break
        if now - started > timeout_s:
            raise UserError(
                f"rank {rank} of {world_size}: {missing_text} did not join within {timeout_s:.0f} s."
                " Check their logs, or raise LAUNCH_RENDEZVOUS_TIMEOUT_S.",
                ExitCode.RENDEZVOUS,
            )
        if rank == 0 and now - logged > LOG_INTERVAL_S:
            logged, waited = now, f"{now - started:.0f} of {timeout_s:.0f} s"
            log(f"waiting for {missing_text} ({waited})")
        time.sleep(PAUSE_S)
    if store.check([LEFT]):  # those that come later would meet nobody
        raise Preempted("stopped by SIGUSR1 before the first step. Nothing is to be saved.")
    store.set(f"seen all/{rank}", "")
    if rank == 0:  # it hosts the store, so it waits until the others have read it
        store.wait([f"seen all/{peer}" for peer in range(world_size)])
    return store


def connect_store(rank: int, timeout: timedelta) -> Store:
    """Return the store of torchrun's agent if its ranks use one, else the store that rank 0 hosts."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0 and host in LOOPBACK:  # else the store listens on all interfaces
        listening = socket.create_server((host, port), family=LOOPBACK[host], backlog=1024).detach()
        return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening)
    return TCPStore(host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)


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


def new_gloo_group(timeout_s: float) -> dist.ProcessGroup:
    """Return a Gloo group of all ranks besides the backend's; all ranks must call this."""
    return cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))
