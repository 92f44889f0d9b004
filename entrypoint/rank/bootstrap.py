"""Runs in every rank before the program: set the environment, pin CPUs and memory, then exec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NoReturn

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import die_with_parent, replace_process
from entrypoint.job.detect import Job
from entrypoint.job.node_group import NodeGroup
from entrypoint.job.run_identity import has_monitor
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import Plan, RankPlan
from entrypoint.rank.environment import build_rank_environment, global_rank_of
from entrypoint.rank.refusal import Place, place_in_job, refuse
from entrypoint.rank.rendezvous import rendezvous_variables, resolve_master


def exec_program(plan: Plan, job: Job, environ: Mapping[str, str]) -> NoReturn:
    """Execute the plan's program as the job's rank; raises `UserError` if that is not possible.

    The rank is pinned before the program starts, because OpenMP reads the CPU mask and its variables only once.
    """
    try:
        job, environment = prepare_rank(plan, job, environ)
    except UserError as error:
        refuse(place_of_rank(plan, job, environ), error)
    if job.launcher:
        die_with_parent()
    if has_monitor(job, environ, plan.rendezvous.run_identity):
        from entrypoint.rank.under_monitor import run_under_monitor  # late: a rank without a monitor does not need it

        run_under_monitor(plan, job, environment)
    replace_process(plan.program.argv, environment)


def prepare_rank(plan: Plan, job: Job, environ: Mapping[str, str]) -> tuple[Job, dict[str, str]]:
    """Pin this process as the job's rank, and return the rank's identity and environment; raises `UserError`."""
    if job.local_rank >= len(plan.ranks):
        raise UserError(
            f"local rank {job.local_rank}: the plan has {len(plan.ranks)} ranks on this node. Start as many ranks."
        )
    rank = plan.ranks[job.local_rank]
    if plan.nodes.nnodes > 1 and not plan.uses_elastic_rendezvous:
        job = global_rank_of(plan, job)
    environment = build_rank_environment(plan, rank, job, environ)
    if job.on_one_node and has_monitor(job, environ, plan.rendezvous.run_identity):
        resolve_master(environment["MASTER_ADDR"], plan.rendezvous.timeout_s)
    if not job.on_one_node:
        environment |= rendezvous_variables(environment, plan.rendezvous.timeout_s, job)
    if plan.binding.cpu_binding != "none":
        pin_process(rank)
    return job, environment


def pin_process(rank: RankPlan) -> None:
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
        from entrypoint.machine.procfs import bind_memory

        try:
            bind_memory(rank.memory_nodes)
        except OSError as error:
            nodes = format_cpu_list(rank.memory_nodes)
            log(f"warning: local rank {rank.local_rank}: memory cannot be bound to node {nodes} ({error.strerror}).")


def place_of_rank(plan: Plan, job: Job, environ: Mapping[str, str]) -> Place | None:
    """Return where a rank stands in its job, None if it cannot tell the others of an error."""
    nodes, rendezvous = plan.nodes, plan.rendezvous
    if plan.uses_elastic_rendezvous:
        return None
    port = "" if rendezvous.port_is_derived else rendezvous.master_port
    group = NodeGroup(nnodes=nodes.nnodes, node_rank=nodes.node_rank, master_addr=rendezvous.master_addr, port=port)
    return place_in_job(job, group, environ, rendezvous.run_identity)
