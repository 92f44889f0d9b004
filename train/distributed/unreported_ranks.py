"""Finds the ranks that are missing from a failed exchange: those that do not report that it failed for them too."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from torch.distributed.distributed_c10d import Store

from entrypoint.machine.procfs import memory_file
from entrypoint.machine.whereabouts import locate
from train.distributed.rendezvous import Peer

# How long ranks have to report, and the store to say who has.
REPORT_WAIT_S, STORE_LIMIT_S = 1.2, 1.0
# Ranks that are asked where they are.
MAX_LOCATED = 4
FILE_NAME = "entrypoint-steps"
STEP_COUNT = struct.Struct("q")


class StepCounter:
    """The steps that this rank has finished, in memory that other processes of this user can read."""

    def __init__(self) -> None:
        self.cell: memoryview | None = None
        with suppress(OSError, AttributeError):
            file = os.memfd_create(FILE_NAME)
            os.truncate(file, mmap.PAGESIZE)
            self.cell = memoryview(mmap.mmap(file, mmap.PAGESIZE))[: STEP_COUNT.size].cast("q")
            self.note(-1)

    def note(self, step: int) -> None:
        """Store the number of finished steps."""
        if self.cell is not None:
            self.cell[0] = step

    @property
    def value(self) -> int:
        """Return the number of finished steps, -1 before training."""
        return -1 if self.cell is None else self.cell[0]


# One per process: it belongs to the process that others look at.
STEPS = StepCounter()


def steps_of(process: int) -> int:
    """Return the steps that another rank of this node has finished, -1 where they are unknown."""
    with suppress(OSError, struct.error):
        path = memory_file(process, FILE_NAME)
        if path:
            return int(STEP_COUNT.unpack(path.read_bytes()[: STEP_COUNT.size])[0])
    return -1


def call_roll(store: Store, rank: int, ranks: Sequence[int]) -> list[int] | None:
    """Report that an exchange failed for this rank, and return the ranks that have not reported that soon after.

    Returns None if the store does not answer, because the process that hosts it is stopped or gone.
    """
    missing: list[list[int]] = []

    def ask() -> None:
        with suppress(RuntimeError):  # torch's DistStoreError and DistNetworkError
            store.set(report_key(rank), "")
            time.sleep(REPORT_WAIT_S)
            missing.append(not_reported(store.check, [other for other in ranks if other != rank]))

    thread = threading.Thread(target=ask, daemon=True)  # a stopped host never answers
    thread.start()
    thread.join(REPORT_WAIT_S + STORE_LIMIT_S)
    return missing[0] if missing else None


def report_key(rank: int) -> str:
    """Return the key under which a rank reports."""
    return f"exchange failed/{rank}"


def not_reported(check: Callable[[list[str]], bool], ranks: Sequence[int]) -> list[int]:
    """Return the ranks without a report, in few questions to the store: each is about half of the ranks."""
    if not ranks or check([report_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    half = len(ranks) // 2
    return not_reported(check, ranks[:half]) + not_reported(check, ranks[half:])


def missing_text(missing: Mapping[int, str]) -> str:
    """Return where the missing ranks are, as the end of an error's line."""
    return "".join(f"; rank {rank} {missing[rank]}" for rank in sorted(missing))


def locate_missing(rank: int, peers: Sequence[Peer], silent: Sequence[int] | None) -> Mapping[int, str]:
    """Return where the missing ranks are, as the end of a sentence about each.

    Without an answer of the store (`silent` is None) only the ranks of this node can be looked at. A rank that waits in
    a collective is not missing, though it may report later.
    """
    mine = next((peer for peer in peers if peer.rank == rank), None)
    found: dict[int, str] = {}
    for peer in peers:
        if peer.rank == rank or (silent is not None and peer.rank not in silent) or len(found) == MAX_LOCATED:
            continue
        if mine is None or (peer.node, peer.address) != (mine.node, mine.address) or peer.node != socket.gethostname():
            if silent is not None:
                found[peer.rank] = "has not reported that it waits"
            continue
        place = locate(peer.process)
        if not place.collective:
            found[peer.rank] = f"(process {peer.process}) {place.text}{steps_text(rank, steps_of(peer.process))}"
    return found


def steps_text(rank: int, theirs: int) -> str:
    """Return how far another rank is, compared with this one; empty where it is unknown."""
    return f" after step {theirs}, rank {rank} after step {STEPS.value}" if theirs >= 0 and STEPS.value >= 0 else ""
