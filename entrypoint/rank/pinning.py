"""Pins a rank's CPUs and memory."""

from __future__ import annotations

import os

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import RankPlan


def pin_process(rank: RankPlan, memory_policy: str) -> None:
    """Pin this process, and so all its threads and children, to the rank's CPUs and memory.

    Raises `UserError` if the CPUs are not available. If memory cannot be bound (a container's seccomp filter forbids
    the call), print a warning. The kernel then still prefers the CPUs' own node.
    """
    try:
        os.sched_setaffinity(0, rank.cpus)
    except OSError as error:
        raise UserError(
            f"local rank {rank.local_rank}: cannot be pinned to CPUs {format_cpu_list(rank.cpus)}"
            f" ({error.strerror}). Set LAUNCH_CPU_BINDING=none to run without pinning.",
            ExitCode.MACHINE,
        ) from None
    if rank.memory_nodes:
        from entrypoint.machine.syscalls import bind_memory

        try:
            bind_memory(memory_policy, rank.memory_nodes)
        except OSError as error:
            nodes = format_cpu_list(rank.memory_nodes)
            log(
                f"warning: local rank {rank.local_rank}: memory cannot be bound to node {nodes} ({error.strerror})."
                " Set LAUNCH_MEMORY_BINDING=default to skip it."
            )
