"""Runs in every rank before the program: set the environment, pin CPUs and memory, then exec."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from msgspec.structs import replace

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import addresses_towards, is_own_address, resolve
from entrypoint.core.package_version import PROJECT, package_version
from entrypoint.core.process import die_with_parent, replace_process, resume_gc
from entrypoint.job.detect import Job
from entrypoint.job.ports import JOB_TOKEN_VAR, fallback_ports, monitor_ports, port_from_job_id
from entrypoint.job.run_identity import PROGRAM, has_monitor
from entrypoint.machine.cpu_topology import format_cpu_list
from entrypoint.plan.model import PLAN_VAR, Plan, RankPlan
from entrypoint.rank.refusal import Place, job_access, make_place, place_of_launched, refuse, run_token
from entrypoint.rank.rendezvous import rendezvous_variables, resolve_master

# Lists the variables that `launch` sets only for torchrun's agent.
AGENT_ONLY_VARS = "ENTRYPOINT_AGENTS_OWN"


# What torchrun sets in a rank (its manual).
TORCHRUN_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
        *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    }
)


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
        check_master(plan, job, environment)
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
    if nodes.nnodes == 1:
        return place_of_launched(job, environ, rendezvous.run_identity)
    port = "" if rendezvous.port_is_negotiable else rendezvous.master_port
    return make_place(
        *(nodes.node_rank, rendezvous.master_addr, port, rendezvous.run_identity, nodes.nnodes), job, environ
    )


def run_under_monitor(plan: Plan, job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Run the program under a monitor; all monitors of the job connect to the master, above the ranks' own ports."""
    from entrypoint.job.job_key import JOB_KEY_VAR, KeySource
    from entrypoint.supervise.admission import RankEndpoint
    from entrypoint.supervise.failure_channel import FailureChannel
    from entrypoint.supervise.monitor import run_guarded

    port, negotiable = int(environment["MASTER_PORT"]), takes_common_port(plan)
    is_unique = not negotiable or not plan.rendezvous.run_identity.startswith(PROGRAM)
    source = KeySource(plan.rendezvous.key_source, plan.rendezvous.key_file)
    access = job_access(source, job, environment, on_one_node=job.on_one_node)
    environment = {name: value for name, value in environment.items() if name != JOB_KEY_VAR}
    endpoint = RankEndpoint(
        *(job.rank, socket.gethostname(), environment["MASTER_ADDR"], monitor_ports(port)),
        token=rank_token(plan, environment),
        world_size=job.world_size,
        version=package_version(PROJECT),
        pid=os.getpid(),
        is_unique=is_unique,
        local_rank=job.local_rank,
        # Two runs of one command by hand have the same identity, and must not share a connection.
        shares_connection=is_unique and job.local_world_size > 1,
    )
    sys.stdout.flush()
    sys.stderr.flush()
    resume_gc()
    ports = fallback_ports(port) if negotiable else ()
    interface = environment.get("GLOO_SOCKET_IFNAME", "")
    channel = FailureChannel(
        endpoint,
        plan.collective_timeout_s,
        ports,
        others=job.world_size - 1,
        access=access,
        addresses=addresses_towards(environment["MASTER_ADDR"], interface) if job.rank == 0 else (),
        nodes=-(-job.world_size // job.local_world_size) if endpoint.shares_connection else 0,
    )
    run_guarded(
        plan.program.argv,
        environment,
        channel,
        plan.rendezvous.timeout_s,
        plan.grace_period_s,
        handles_preemption=plan.program.kind == "train",
    )


def takes_common_port(plan: Plan) -> bool:
    """Return whether the ranks take the port that rank 0's monitor chooses."""
    return plan.rendezvous.port_is_negotiable and not plan.uses_elastic_rendezvous


def check_master(plan: Plan, job: Job, environment: Mapping[str, str]) -> None:
    """Raise `UserError` on rank 0, and tell the other nodes, if MASTER_ADDR is another machine's address.

    A port that the user or platform sets may lead here from another address, as a Kubernetes service's does.
    """
    if job.rank or not takes_common_port(plan) or is_own_address(resolve(environment["MASTER_ADDR"])):
        return
    node = socket.gethostname()
    hint = master_addr_hint(job).replace("HOST", node)
    error = UserError(
        f"MASTER_ADDR={printable(environment['MASTER_ADDR'])}: is another machine's address, and rank 0 is on {node}."
        f" Start the ranks with {hint}, or start rank 0 there.",
        ExitCode.RENDEZVOUS,
    )
    from entrypoint.supervise.monitor import kill_stuck_launchers

    place = Place(
        *(0, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), rank_token(plan, environment), 0),
        *(plan.rendezvous.run_identity, job, environment),
        on_one_node=job.on_one_node,
    )
    by_hand = plan.nodes.nnodes > 1  # then another node may be rank 0's; a launcher ends its other ranks
    if (job.launcher or "").startswith("hydra") and not job.on_one_node:  # hydra does not, unless its own process ends
        kill_stuck_launchers()
    refuse(place if by_hand or job.on_one_node else None, error, listens=job.on_one_node)


def rank_token(plan: Plan, environment: Mapping[str, str]) -> str:
    """Return what the monitors of this run have in common."""
    return run_token(int(environment["MASTER_PORT"]), plan.rendezvous.run_identity, negotiable=takes_common_port(plan))


def global_rank_of(plan: Plan, job: Job) -> Job:
    """Return a rank's identity in the whole job; each node's agent knows only its own ranks.

    The agents do not connect to each other. If the network between two agents failed, each would hang for minutes.
    Every node starts the same number of ranks.
    """
    size = plan.nodes.nproc_per_node
    rank = plan.nodes.node_rank * size + job.local_rank
    return replace(job, rank=rank, world_size=plan.nodes.nnodes * size, local_world_size=size, job_id="")


def build_rank_environment(plan: Plan, rank: RankPlan, job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of one rank; variables that the user set take precedence."""
    agents = {AGENT_ONLY_VARS, *environ.get(AGENT_ONLY_VARS, "").split(",")}
    environ = {name: value for name, value in environ.items() if name not in agents}
    environment = {**environ, **plan.environment.variables, PLAN_VAR: plan.to_variable()}
    if "OMP_NUM_THREADS" not in plan.environment.user_set:
        environment["OMP_NUM_THREADS"] = str(rank.threads)
    if not plan.environment.sets_rank:
        return with_preload(
            plan, {name: value for name, value in environment.items() if name not in TORCHRUN_VARIABLES}
        )
    environment |= {
        "RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_RANK": str(job.local_rank),
        "LOCAL_WORLD_SIZE": str(job.local_world_size),
    }
    if plan.nodes.nnodes > 1 and not plan.uses_elastic_rendezvous:  # replaces the address of this node's agent
        environment |= {"MASTER_ADDR": plan.rendezvous.master_addr, "MASTER_PORT": plan.rendezvous.master_port}
        environment |= {"GROUP_RANK": str(plan.nodes.node_rank), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    if plan.program.kind != "train" and job.launcher != "srun":
        # This variable shows Lightning that the ranks are already started. Without it Lightning assumes srun in any
        # batch job, and waits for ranks that nothing starts. Under srun that assumption is right.
        environment.setdefault("TORCHELASTIC_RUN_ID", job.job_id or "none")
    if job.world_size > 1 and plan.program.kind == "train":
        # c10d prints long warnings about failed reverse lookups. The trainer reports the relevant errors.
        environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if not environment.get("MASTER_ADDR"):
        environment["MASTER_ADDR"] = "127.0.0.1" if job.on_one_node else require_master_addr(plan, job)
    if not environment.get("MASTER_PORT"):
        environment["MASTER_PORT"] = str(master_port(job, environment.get(JOB_TOKEN_VAR, "")))
    return with_preload(plan, environment)


def with_preload(plan: Plan, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the plan's libraries before the user's own in LD_PRELOAD."""
    if plan.environment.preload:
        own = environment.get("LD_PRELOAD", "")
        environment["LD_PRELOAD"] = ":".join((*plan.environment.preload, *([own] if own else [])))
    return environment


# How each launcher sets a variable for all ranks (its manual).
MASTER_ADDR_HINTS = {"Open MPI": "mpirun -x MASTER_ADDR=HOST", "hydra": "mpiexec -genv MASTER_ADDR HOST"}


def master_addr_hint(job: Job) -> str:
    """Return how the user sets MASTER_ADDR=HOST for all ranks."""
    hints = (line for name, line in MASTER_ADDR_HINTS.items() if (job.launcher or "").startswith(name))
    return next(hints, "MASTER_ADDR=HOST")


def require_master_addr(plan: Plan, job: Job) -> str:
    """Return the host of rank 0 that the launcher sets; raises `UserError` if it sets none."""
    if plan.rendezvous.master_addr:
        return plan.rendezvous.master_addr
    raise UserError(
        f"MASTER_ADDR is not set: {job.launcher} started ranks on several nodes without the address of rank 0. Start"
        f" them with {master_addr_hint(job)}, the node of rank 0.",
        ExitCode.RENDEZVOUS,
    )


def master_port(job: Job, job_token: str = "") -> int:
    """Return a free port for a single rank, else the port that every rank derives from the job's id."""
    if job.world_size == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return port_from_job_id(job.job_id or job_token)


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
            warn(
                rank,
                f"memory cannot be bound to node {nodes} ({error.strerror}). Set LAUNCH_MEMORY_BINDING=default to"
                " skip it.",
            )


def warn(rank: RankPlan, line: str) -> None:
    """Print a warning of a rank."""
    log(f"warning: local rank {rank.local_rank}: {line}")
