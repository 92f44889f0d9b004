"""Runs in every rank before the program: set the environment, pin CPUs and memory, then exec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

from entrypoint.core.errors import UserError
from entrypoint.core.process import die_with_parent, replace_process
from entrypoint.job.detect import Job
from entrypoint.job.node_group import NodeGroup
from entrypoint.job.run_identity import has_monitor
from entrypoint.plan.model import Plan
from entrypoint.rank.environment import build_rank_environment, global_rank_of
from entrypoint.rank.pinning import pin_process
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
        pin_process(rank, plan.binding.memory_policy)
    return job, environment


def place_of_rank(plan: Plan, job: Job, environ: Mapping[str, str]) -> Place | None:
    """Return where a rank stands in its job, None if it cannot tell the others of an error."""
    nodes, rendezvous = plan.nodes, plan.rendezvous
    if plan.uses_elastic_rendezvous:
        return None
    port = "" if rendezvous.port_is_derived else rendezvous.master_port
    group = NodeGroup(nnodes=nodes.nnodes, node_rank=nodes.node_rank, master_addr=rendezvous.master_addr, port=port)
    return place_in_job(job, group, environ, rendezvous.run_identity)
