"""The process group of the trainer with its collectives."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from entrypoint.core.console import STDOUT, redirected
from entrypoint.core.errors import ExitCode, UserError, first_line
from entrypoint.plan.model import Plan, Source
from entrypoint.rank.environment import RANK0_HOST_VAR
from train.distributed.exchange import all_gather_values, broadcast_value
from train.distributed.peers import Peer, local_peer, new_gloo_group, wait_for_all_ranks
from train.distributed.shared_memory import SharedMemoryGroup, open_shared_memory

T = TypeVar("T")
GLOO_DRAIN_S = 0.1
# Their collectives wait for ever for a rank that is stopped.
UNTIMED_BACKENDS = ("ccl", "mpi")


@dataclass(frozen=True)
class ProcessGroup:
    """All ranks of the job. With one rank no process group exists, and every collective returns at once.

    `peers` are all ranks of the job.
    `control` is the group for values on the CPU: Gloo next to another backend, None for the backend itself.
    `memory` is the memory that the ranks of one node share, None if they cannot share any.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None = None
    peers: tuple[Peer, ...] = ()
    memory: SharedMemoryGroup | None = None

    @property
    def is_main(self) -> bool:
        """Return whether this is rank 0, which writes and prints."""
        return self.rank == 0

    def node_of(self, rank: int) -> str:
        """Return the name of a rank's node, empty for a job of one rank."""
        return next((peer.node for peer in self.peers if peer.rank == rank), "")

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place, and return it."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def run_on_main(self, make: Callable[[], T], kind: Any = NoneType) -> T:
        """Run `make` on rank 0 and return its result, a `kind`, on every rank; every rank raises its `UserError`."""
        if self.world_size == 1:
            return make()
        outcome: tuple[UserError | None, T | None] = (None, None)
        if self.is_main:
            try:
                outcome = None, make()
            except UserError as error:
                outcome = error, None
        failed, result = broadcast_value(outcome, tuple[UserError | None, kind | None], self.control)
        if failed:
            raise failed
        return cast("T", result)

    def run_on_nodes(self, make: Callable[[], None]) -> None:
        """Run `make` on the first rank of each node; every rank raises its `UserError`."""
        error: UserError | None = None
        if self.local_rank == 0:
            try:
                make()
            except UserError as caught:
                error = caught
        for failed in filter(None, self.gather(error, UserError | None)):
            raise failed

    def gather(self, value: T, kind: Any) -> list[T]:
        """Return every rank's value, a `kind`, in order of rank, on every rank."""
        return [value] if self.world_size == 1 else all_gather_values(value, kind, self.control)

    def broadcast_buffers(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors (such as BatchNorm's statistics) with rank 0's."""
        if self.world_size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, 0)

    def all_reduce_max_async(self, value: int) -> Callable[[], int]:
        """Start an all-reduce of the maximum; the returned function waits for the result.

        Started before a step and read after it, it does not delay the step.
        """
        if self.world_size == 1:
            return lambda: value
        tensor = torch.tensor([value], dtype=torch.int32)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control, async_op=True)

        def result() -> int:
            work.wait()
            return int(tensor.item())

        return result

    def drain(self) -> None:
        """Wait for Gloo's background thread before the process group is destroyed.

        That thread needs the GIL to free its last tensors. Destroying the group holds the GIL while it waits for the
        thread, which can deadlock (torch 2.8).
        """
        if self.world_size > 1:
            time.sleep(GLOO_DRAIN_S)

    def destroy(self) -> None:
        """Destroy the process group; without this a rank can abort at exit.

        oneCCL may wait for a lost rank here for ever. Its group is left to the end of the process.
        """
        if self.world_size > 1 and dist.is_initialized() and dist.get_backend() not in UNTIMED_BACKENDS:
            dist.destroy_process_group()


def local_process(plan: Plan) -> ProcessGroup:
    """Return this process's RANK, WORLD_SIZE and LOCAL_RANK, before it is connected to the other ranks.

    Raises `UserError` without the plan's device.
    """
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    return ProcessGroup(rank, world_size, local_rank, choose_device(plan, local_rank))


def init_process_group(group: ProcessGroup, plan: Plan) -> ProcessGroup:
    """Connect to the other ranks through MASTER_ADDR and MASTER_PORT; raises `UserError` if that fails."""
    rank, world_size = group.rank, group.world_size
    limit = timedelta(seconds=plan.collective_timeout_s)
    if world_size == 1:
        return group
    register_backend(plan.backend)
    try:
        store = wait_for_all_ranks(rank, world_size, plan.rendezvous.timeout_s)
        # Gloo in torch 2.8 prints a line for each connection to standard output.
        with Path(os.devnull).open("wb") as nowhere, redirected(STDOUT, nowhere.fileno()):
            dist.init_process_group(plan.backend, timeout=limit, store=store, rank=rank, world_size=world_size)
    except (RuntimeError, ValueError, OSError) as error:
        own_way = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        where = os.environ.get(RANK0_HOST_VAR) or own_way
        cause = first_line(error)
        raise UserError(
            f"rank {rank} of {world_size}: no {plan.backend} connection to the other ranks at {where}: {cause}",
            ExitCode.RENDEZVOUS,
        ) from None
    control = new_gloo_group(plan.collective_timeout_s) if plan.backend != "gloo" else None
    group = replace(group, control=control)
    group = replace(group, peers=tuple(group.gather(local_peer(rank), Peer)))
    backend = plan.decision("backend")
    named_by_user = backend is not None and backend.source == Source.USER  # then it runs all collectives
    if named_by_user or group.device.type != "cpu" or len({peer.node for peer in group.peers}) > 1:
        return group
    return replace(group, memory=open_shared_memory(rank, world_size, plan.collective_timeout_s))


def open_save_group(group: ProcessGroup, timeout_s: float) -> dist.ProcessGroup | None:
    """Return a process group of its own for the threads that save; all ranks must call this.

    Why: the main threads use the other groups at the same time, and ranks must call collectives in the same order.
    """
    if group.world_size == 1:
        return None
    with Path(os.devnull).open("wb") as nowhere, redirected(STDOUT, nowhere.fileno()):
        return new_gloo_group(timeout_s)


def register_backend(backend: str) -> None:
    """Import the package that adds oneCCL's backend to torch; raises `UserError` if that fails."""
    if backend != "ccl":
        return
    try:
        importlib.import_module("oneccl_bindings_for_pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"LAUNCH_BACKEND=ccl: oneccl_bindings_for_pytorch cannot be imported ({first_line(error)})."
            " Set LAUNCH_BACKEND=auto.",
            ExitCode.MACHINE,
        ) from None


def choose_device(plan: Plan, local_rank: int) -> torch.device:
    """Return this rank's device; raises `UserError` if the plan uses CUDA and this build of torch has none."""
    if plan.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(
            f"device cuda: torch {torch.__version__} finds no CUDA that it can use; set LAUNCH_DEVICE=cpu, or use"
            " the CUDA image and a driver that is new enough for it",
            ExitCode.MACHINE,
        )
    device = torch.device("cuda", plan.ranks[local_rank].gpu or 0)
    torch.cuda.set_device(device)
    return device
