"""The last step before the program, in each rank: map the launcher's variables, bind, then exec."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import die_with_parent, replace_process
from entrypoint.job.detect import Job
from entrypoint.job.ports import JOB_TOKEN_VAR, fallback_ports, monitor_ports, port_from_job_id
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import PLAN_VAR, Plan, RankPlan
from entrypoint.rank.rendezvous import rendezvous_variables

# Names of variables that `launch` has set for torchrun's agent alone.
AGENT_ONLY_VARS = "ENTRYPOINT_AGENTS_OWN"


def exec_program(plan: Plan, job: Job, environ: Mapping[str, str]) -> NoReturn:
    """Turn this process into the plan's program as the job's rank; raises `UserError` where it cannot.

    Binding comes before the program's interpreter starts, since OpenMP reads mask and variables only once.
    """
    if job.local_rank >= len(plan.ranks):
        raise UserError(
            f"local rank {job.local_rank}: the plan has {len(plan.ranks)} ranks on this node; start as many"
        )
    rank = plan.ranks[job.local_rank]
    if plan.nodes.nnodes > 1 and not plan.uses_elastic_rendezvous:
        job = global_rank_of(plan, job)
    environment = build_rank_environment(plan, rank, job, environ)
    if not job.on_one_node:
        environment |= rendezvous_variables(environment, plan.rendezvous.timeout_s, job)
    if plan.binding.cpu_binding != "none":
        pin_process(rank, plan.binding.memory_policy)
    if job.launcher:
        die_with_parent()
    if not job.on_one_node:
        run_under_monitor(plan, job, environment)
    replace_process(plan.program.argv, environment)


def run_under_monitor(plan: Plan, job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Stay beside the program as its guard; all guards of the job meet at the master, above the ranks' own ports."""
    from entrypoint.supervise.failure_channel import FailureChannel, RankEndpoint
    from entrypoint.supervise.monitor import run_guarded

    port = int(environment["MASTER_PORT"])
    token = f"{port} {job.world_size} {job.job_id} {environment.get(JOB_TOKEN_VAR, '')}"
    endpoint = RankEndpoint(job.rank, socket.gethostname(), environment["MASTER_ADDR"], monitor_ports(port), token)
    ports = fallback_ports(port) if plan.rendezvous.port_is_negotiable and not plan.uses_elastic_rendezvous else ()
    sys.stdout.flush()
    sys.stderr.flush()
    channel = FailureChannel(endpoint, plan.collective_timeout_s, ports)
    run_guarded(plan.program.argv, environment, channel, plan.rendezvous.timeout_s, plan.grace_period_s)


def global_rank_of(plan: Plan, job: Job) -> Job:
    """Return a rank's place in the whole job; each node's agent knows only its own ranks.

    Agents do not meet: what they would share they could lose, and of two that are cut off from each other each would
    hang for minutes. Every node starts the same number of ranks.
    """
    size = plan.nodes.nproc_per_node
    rank = plan.nodes.node_rank * size + job.local_rank
    return replace(job, rank=rank, world_size=plan.nodes.nnodes * size, local_world_size=size, job_id="")


def build_rank_environment(plan: Plan, rank: RankPlan, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of one rank; what a person has set wins."""
    agents = {AGENT_ONLY_VARS, *environ.get(AGENT_ONLY_VARS, "").split(",")}
    environ = {name: value for name, value in environ.items() if name not in agents}
    environment = {**environ, **plan.environment.variables, PLAN_VAR: plan.to_variable()}
    if "OMP_NUM_THREADS" not in plan.environment.user_set:
        environment["OMP_NUM_THREADS"] = str(rank.threads)
    environment |= {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
    }
    if plan.nodes.nnodes > 1 and not plan.uses_elastic_rendezvous:  # this node's agent has set its own
        environment |= {"MASTER_ADDR": plan.rendezvous.master_addr, "MASTER_PORT": plan.rendezvous.master_port}
        environment |= {"GROUP_RANK": str(plan.nodes.node_rank), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if plan.program.kind != "train" and job.launcher != "srun":
        # By its name Lightning knows that ranks are started and told all, and who cannot be right; else it takes
        # itself for Slurm's in any batch job, and waits for ranks that nobody starts. Under srun its own way is right.
        environment.setdefault("TORCHELASTIC_RUN_ID", job.job_id or "none")
    if job.world_size > 1 and plan.program.kind == "train":
        # c10d warns at length of names that do not resolve back; what matters, the trainer says itself.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if plan.environment.preload:
        own = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = ":".join((*plan.environment.preload, *([own] if own else [])))
    if not environment.get("MASTER_ADDR"):
        environment["MASTER_ADDR"] = "127.0.0.1" if job.on_one_node else require_master_addr(plan, job)
    if not environment.get("MASTER_PORT"):
        environment["MASTER_PORT"] = str(master_port(job, environment.get(JOB_TOKEN_VAR, "")))
    return environment


# How each launcher is told a variable for all of its ranks (its manual).
MASTER_ADDR_HINTS = {"Open MPI": "mpirun -x MASTER_ADDR=HOST", "hydra": "mpiexec -genv MASTER_ADDR HOST"}


def require_master_addr(plan: Plan, job: Job) -> str:
    """Return where rank 0 runs as the launcher tells it; raises `UserError` where it does not."""
    if plan.rendezvous.master_addr:
        return plan.rendezvous.master_addr
    how = next(
        (line for name, line in MASTER_ADDR_HINTS.items() if (job.launcher or "").startswith(name)), "MASTER_ADDR=HOST"
    )
    raise UserError(
        f"MASTER_ADDR is not set: {job.launcher} started ranks on several nodes and does not say where rank 0 is; start"
        f" them with {how}, the node of rank 0",
        ExitCode.RENDEZVOUS,
    )


def master_port(job: Job, job_token: str = "") -> int:
    """Return a free port for a rank that is alone, else one that every rank works out from the job's id."""
    if job.world_size == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return port_from_job_id(job.job_id or job_token)


def pin_process(rank: RankPlan, memory_policy: str) -> None:
    """Pin this process, and so all its threads and children, to the rank's CPUs and memory.

    Raises `UserError` where the CPUs are not to be had. Memory that cannot be bound is warned of: it comes from the
    CPUs' own node all the same while that has any (a container's seccomp filter forbids the call).
    """
    try:
        os.sched_setaffinity(0, rank.cpus)
    except OSError as error:
        raise UserError(
            f"local rank {rank.local_rank}: cannot be bound to CPUs {format_cpu_list(rank.cpus)}"
            f" ({error.strerror}); set LAUNCH_CPU_BINDING=none to go on unbound",
            ExitCode.MACHINE,
        ) from None
    if rank.memory_nodes:
        from entrypoint.machine.syscalls import bind_memory

        try:
            bind_memory(memory_policy, rank.memory_nodes)
        except OSError as error:
            nodes = format_cpu_list(rank.memory_nodes)
            warn(
                rank,
                f"memory cannot be bound to node {nodes} ({error.strerror}); LAUNCH_MEMORY_BINDING=default does not"
                " try",
            )


def warn(rank: RankPlan, line: str) -> None:
    """Tell what a rank goes on without."""
    log(f"warning: local rank {rank.local_rank}: {line}")
