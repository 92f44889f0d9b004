"""Sums and means over the ranks of one node through shared memory, for BatchNorm and gradients.

Why not Gloo: it passes each collective to its own threads and through the kernel's sockets.
Each of these handovers wakes a sleeping core, and a step of ResNet-18 needs 40 sums.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from train.distributed.exchange import broadcast_value
from train.seeding import shard_slice

# The most values of a sum. Larger sums use the process group, which is as fast for them.
SUM_CAPACITY = 1 << 14
# Values of a mean that are exchanged at once: a few such chunks fit into a core's cache.
MEAN_CHUNK = 1 << 18
# A counter per rank, on a cache line of its own.
CACHE_LINE = 64
INT64_BYTES, FLOAT32_BYTES = 8, 4
# A waiting rank polls for SPIN_S without a pause, then sleeps between polls. Why: other ranks may need the core.
SPIN_S = 100e-6
SLEEP_S = 20e-6
# Seconds between checks whether the awaited rank is alive.
LIVENESS_INTERVAL_S = 0.05
# A rank that has not made these checks for so long was suspended, as by `scontrol suspend`; the others probably too.
SUSPENDED_S = 1.0


class SharedMemoryGroup:
    """Memory that all ranks of one node share: `fd` is an open file of `buffer_size(world_size)` bytes.

    Two sets of slots alternate, because a rank can be one sum ahead of the others, but not two.
    It then writes to the set that no rank reads.
    `parts` has a row for each rank's part of a mean, and one for the mean.
    Relies on stores becoming visible in order, as on x86-64 (Intel's manual, volume 3, 9.2).
    """

    def __init__(self, fd: int, rank: int, world_size: int, timeout_s: float) -> None:
        self.fd, self.rank, self.world_size, self.timeout_s = fd, rank, world_size, timeout_s
        self.epoch = 0
        memory = mmap.mmap(fd, buffer_size(world_size))
        self.counters = memoryview(memory)[: world_size * CACHE_LINE].cast("q")
        begin, count = world_size * CACHE_LINE, 2 * world_size * SUM_CAPACITY
        slots = torch.frombuffer(memory, dtype=torch.float64, offset=begin, count=count)
        self.slots = slots.view(2, world_size, SUM_CAPACITY)
        parts = torch.frombuffer(memory, dtype=torch.float32, offset=begin + INT64_BYTES * count)
        self.parts = parts.view(world_size + 1, MEAN_CHUNK)
        # The kernel releases this lock when the process exits. Other ranks detect the exit by that.
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)

    def __deepcopy__(self, _: dict[int, Any]) -> SharedMemoryGroup:
        """Return the same object, because modules that hold it are copied."""
        return self

    def sum(self, tensor: Tensor) -> None:
        """Sum a float64 tensor over all ranks in place; the result is bitwise identical on every rank.

        Raises RuntimeError if a rank has exited, or does not arrive within the collective timeout.
        """
        count = tensor.numel()
        if count > SUM_CAPACITY:
            dist.all_reduce(tensor)
            return
        slots = self.slots[self.epoch % 2]
        slots[self.rank, :count] = tensor.view(-1)
        self.barrier()
        torch.sum(slots[:, :count], 0, out=tensor.view(-1))

    def mean(self, values: Tensor) -> None:
        """Average a float32 vector over all ranks in place, bitwise identical on every rank.

        Each rank averages one part. Raises RuntimeError as `sum` does.
        """
        for chunk in torch.split(values, MEAN_CHUNK):
            count = len(chunk)
            mine = shard_slice(count, self.rank, self.world_size)
            other_slices = slice(mine.start), slice(mine.stop, count)
            for part in other_slices:
                self.parts[self.rank, part] = chunk[part]
            self.barrier()
            for other in range(self.world_size):
                if other != self.rank:
                    chunk[mine].add_(self.parts[other, mine])
            self.parts[-1, mine] = chunk[mine].div_(self.world_size)
            self.barrier()
            for part in other_slices:
                chunk[part] = self.parts[-1, part]

    def barrier(self) -> None:
        """Wait until all ranks are here; every rank then sees the writes of all ranks before it."""
        self.epoch += 1
        self.counters[self.rank * CACHE_LINE // INT64_BYTES] = self.epoch
        for other in range(self.world_size):
            if self.counters[other * CACHE_LINE // INT64_BYTES] < self.epoch:
                self.wait_in_collective(other)

    def wait_in_collective(self, other: int) -> None:
        """Wait until another rank has arrived at the same barrier, not counting time in which this one is suspended."""
        index, epoch = other * CACHE_LINE // INT64_BYTES, self.epoch
        started = checked = time.monotonic()
        while self.counters[index] < epoch:
            now = time.monotonic()
            if now - started < SPIN_S:
                continue
            time.sleep(SLEEP_S)
            if now - checked > LIVENESS_INTERVAL_S:
                if now - checked > SUSPENDED_S:
                    started += now - checked
                checked = now
                if self.has_exited(other) and self.counters[index] < epoch:
                    raise RuntimeError(f"shared memory: connection closed by rank {other}")
                if now - started > self.timeout_s:
                    raise RuntimeError(f"shared memory: timed out waiting {self.timeout_s:.0f} s for rank {other}")

    def has_exited(self, other: int) -> bool:
        """Return whether a rank's process has exited."""
        try:
            fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, other)
        except OSError:
            return False
        fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, other)  # so that other ranks can test it too
        return True


def buffer_size(world_size: int) -> int:
    """Return the bytes for this number of ranks."""
    return world_size * (CACHE_LINE + 2 * SUM_CAPACITY * INT64_BYTES) + (world_size + 1) * MEAN_CHUNK * FLOAT32_BYTES


def open_shared_memory(rank: int, world_size: int, timeout_s: float) -> SharedMemoryGroup | None:
    """Return memory that all ranks of the job share, None if they cannot; all ranks must call this, and agree.

    The memory has no name, so it is freed with the last process. Other ranks open it through rank 0's /proc entry.
    Ranks in separate containers do not see this entry. Processors with weaker memory order are not supported.
    """
    mine = -1
    offer = ("", "")
    if rank == 0 and platform.machine() == "x86_64":
        with suppress(OSError):
            mine = os.memfd_create("ranks")
            os.posix_fallocate(mine, 0, buffer_size(world_size))
            offer = (f"/proc/{os.getpid()}/fd/{mine}", file_identity(mine))
    path, known = broadcast_value(offer, tuple[str, str])
    if rank and path:
        with suppress(OSError):
            mine = os.open(path, os.O_RDWR)
    agreed = torch.tensor([int(mine >= 0 and file_identity(mine) == known)])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    if not agreed:
        if mine >= 0:
            os.close(mine)
        return None
    memory = SharedMemoryGroup(mine, rank, world_size, timeout_s)
    dist.barrier()  # until each rank holds its lock, which shows that it is alive
    return memory


def file_identity(fd: int) -> str:
    """Return a text that distinguishes a file from all others of this boot, in every process."""
    stat = os.fstat(fd)
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size}"
