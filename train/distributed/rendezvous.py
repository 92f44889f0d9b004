"""The ranks of a job by name: how they come together, and which of them is lost when an exchange fails."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.network import LOG_INTERVAL_S, interface_address

# The discard service: nobody listens, so a node that is there refuses the connection.
DISCARD_PORT = 9
PAUSE_S = 0.05


@dataclass(frozen=True)
class Peer:
    """A rank, and the node that it is on by name and by its address in the job's network."""

    rank: int
    node: str
    address: str


def local_peer(rank: int) -> Peer:
    """Return this process as its peers may know it."""
    # On the master, its name may be its loopback: then the network's interface gives its address in the job.
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    address = interface_address(interface) if interface else ""
    return Peer(rank, socket.gethostname(), address or own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")))


def own_address(master: str) -> str:
    """Return this node's address on the way to the master."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((master, DISCARD_PORT))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def wait_for_all_ranks(rank: int, world_size: int, timeout_s: float) -> Store:
    """Return the store that all ranks have come to, rank 0 telling meanwhile who is missing.

    It is the one that RANK, WORLD_SIZE and MASTER_* lead to. Raises `UserError` where not all came within `timeout_s`
    seconds. Later failures are to show sooner than that, hence this wait apart from the process group's own.
    """
    store = connect_store(rank, timedelta(seconds=timeout_s))
    store.set(f"here/{rank}", "")
    began = logged = time.monotonic()
    missing = list(range(world_size))
    while missing := [one for one in missing if not store.check([f"here/{one}"])]:
        now, who = time.monotonic(), format_ranks(missing)
        if now - began > timeout_s:
            raise UserError(
                f"rank {rank} of {world_size}: {who} did not come within {timeout_s:.0f} s; see why there, or raise"
                " LAUNCH_RENDEZVOUS_TIMEOUT_S",
                ExitCode.RENDEZVOUS,
            )
        if rank == 0 and now - logged > LOG_INTERVAL_S:
            logged, waited = now, f"{now - began:.0f} of {timeout_s:.0f} s"
            log(f"waiting for {who} ({waited})")
        time.sleep(PAUSE_S)
    store.set(f"seen all/{rank}", "")
    if rank == 0:  # which hosts the store: it must not end before the others have looked
        store.wait([f"seen all/{one}" for one in range(world_size)])
    return store


def connect_store(rank: int, timeout: timedelta) -> Store:
    """Return the store of torchrun's agent where it has one for its ranks, else the one that rank 0 hosts."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(rendezvous("env://", timeout=timeout))[0]
        return store
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(host, port, is_master=rank == 0, timeout=timeout, wait_for_workers=False)


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as `rank 3` or `ranks 1, 3`, the first eight of many."""
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
