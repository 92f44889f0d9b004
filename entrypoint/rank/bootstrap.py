"""The last step before the program, in each rank: map the launcher's variables, bind, then exec."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

from entrypoint.core.console import say
from entrypoint.core.errors import Exit, Refused
from entrypoint.core.process import end_with_parent, replace_process
from entrypoint.job.detect import Job
from entrypoint.job.ports import JOB, agreed_port, guards_ports, next_ports
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import VARIABLE, Plan, Rank
from entrypoint.rank.rendezvous import meeting_variables

# Names of variables that `launch` has set for torchrun's agent alone.
AGENTS_OWN = "ENTRYPOINT_AGENTS_OWN"


def become_program(plan: Plan, job: Job, environ: Mapping[str, str]) -> NoReturn:
    """Turn this process into the plan's program as the job's rank; raises `Refused` where it cannot.

    Binding comes before the program's interpreter starts, since OpenMP reads mask and variables only once.
    """
    if job.local_rank >= len(plan.ranks):
        raise Refused(f"local rank {job.local_rank}: the plan has {len(plan.ranks)} ranks on this node; start as many")
    rank = plan.ranks[job.local_rank]
    if plan.nnodes > 1 and not plan.agents_meet:
        job = among_nodes(plan, job)
    environment = rank_environment(plan, rank, job, environ)
    if not job.on_one_node:
        environment |= meeting_variables(environment, plan.rendezvous_timeout_s, job)
    if plan.bind != "none":
        bind(rank, plan.memory_policy)
    if job.launcher:
        end_with_parent()
    if not job.on_one_node:
        become_guard(plan, job, environment)
    replace_process(plan.program.argv, environment)


def become_guard(plan: Plan, job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Stay beside the program as its guard; all guards of the job meet at the master, above the ranks' own ports."""
    from entrypoint.supervise.failure_channel import Bond, Place
    from entrypoint.supervise.monitor import guard

    port = int(environment["MASTER_PORT"])
    token = f"{port} {job.world_size} {job.id} {environment.get(JOB, '')}"
    place = Place(job.rank, socket.gethostname(), environment["MASTER_ADDR"], guards_ports(port), token)
    ports = next_ports(port) if plan.port_moves and not plan.agents_meet else ()
    sys.stdout.flush()
    sys.stderr.flush()
    bond = Bond(place, plan.fail_timeout_s, ports)
    guard(plan.program.argv, environment, bond, plan.rendezvous_timeout_s, plan.grace_s)


def among_nodes(plan: Plan, job: Job) -> Job:
    """Return a rank's place in the whole job; each node's agent knows only its own ranks.

    Agents do not meet: what they would share they could lose, and of two that are cut off from each other each would
    hang for minutes. Every node starts the same number of ranks.
    """
    size = plan.nproc_per_node
    rank = plan.node_rank * size + job.local_rank
    return replace(job, rank=rank, world_size=plan.nnodes * size, local_world_size=size, id="")


def rank_environment(plan: Plan, rank: Rank, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of one rank; what a person has set wins."""
    agents = {AGENTS_OWN, *environ.get(AGENTS_OWN, "").split(",")}
    environ = {name: value for name, value in environ.items() if name not in agents}
    environment = {**environ, **plan.environment, VARIABLE: plan.to_variable()}
    if "OMP_NUM_THREADS" not in plan.yours:
        environment["OMP_NUM_THREADS"] = str(rank.threads)
    environment |= {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
    }
    if plan.nnodes > 1 and not plan.agents_meet:  # this node's agent has set its own
        environment |= {"MASTER_ADDR": plan.master_addr, "MASTER_PORT": plan.master_port}
        environment |= {"GROUP_RANK": str(plan.node_rank), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if plan.program.kind != "train" and job.launcher != "srun":
        # By its name Lightning knows that ranks are started and told all, and who cannot be right; else it takes
        # itself for Slurm's in any batch job, and waits for ranks that nobody starts. Under srun its own way is right.
        environment.setdefault("TORCHELASTIC_RUN_ID", job.id or "none")
    if job.world_size > 1 and plan.program.kind == "train":
        # c10d warns at length of names that do not resolve back; what matters, the trainer says itself.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if plan.preload:
        own = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = ":".join((*plan.preload, *([own] if own else [])))
    if not environment.get("MASTER_ADDR"):
        environment["MASTER_ADDR"] = "127.0.0.1" if job.on_one_node else known_master(plan, job)
    if not environment.get("MASTER_PORT"):
        environment["MASTER_PORT"] = str(master_port(job, environment.get(JOB, "")))
    return environment


# How each launcher is told a variable for all of its ranks (its manual).
TELL_ALL = {"Open MPI": "mpirun -x MASTER_ADDR=HOST", "hydra": "mpiexec -genv MASTER_ADDR HOST"}


def known_master(plan: Plan, job: Job) -> str:
    """Return where rank 0 runs as the launcher tells it; raises `Refused` where it does not."""
    if plan.master_addr:
        return plan.master_addr
    how = next((line for name, line in TELL_ALL.items() if (job.launcher or "").startswith(name)), "MASTER_ADDR=HOST")
    raise Refused(
        f"MASTER_ADDR is not set: {job.launcher} started ranks on several nodes and does not say where rank 0 is; start"
        f" them with {how}, the node of rank 0",
        Exit.RENDEZVOUS,
    )


def master_port(job: Job, job_token: str = "") -> int:
    """Return a free port for a rank that is alone, else one that every rank works out from the job's id."""
    if job.world_size == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return agreed_port(job.id or job_token)


def bind(rank: Rank, memory_policy: str) -> None:
    """Pin this process, and so all its threads and children, to the rank's CPUs and memory.

    Raises `Refused` where the CPUs are not to be had. Memory that cannot be bound is warned of: it comes from the
    CPUs' own node all the same while that has any (a container's seccomp filter forbids the call).
    """
    try:
        os.sched_setaffinity(0, rank.cpus)
    except OSError as error:
        raise Refused(
            f"local rank {rank.local_rank}: cannot be bound to CPUs {format_cpu_list(rank.cpus)}"
            f" ({error.strerror}); set LAUNCH_CPU_BINDING=none to go on unbound",
            Exit.MACHINE,
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


def warn(rank: Rank, line: str) -> None:
    """Tell what a rank goes on without."""
    say(f"warning: local rank {rank.local_rank}: {line}")
