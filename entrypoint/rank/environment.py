"""The environment of a rank: its identity in the whole job, and the variables that torchrun would set."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.job.detect import Job
from entrypoint.job.launchers import Family
from entrypoint.job.node_group import JOB_TOKEN_VAR, port_from_job_id
from entrypoint.plan.model import PLAN_VAR, Plan, RankPlan

# Lists the variables that `launch` sets only for torchrun's agent.
AGENT_ONLY_VARS = "ENTRYPOINT_AGENTS_OWN"
# With "True" torch's `env://` takes MASTER_ADDR and MASTER_PORT for a store that is already served, on every rank.
AGENT_STORE_VAR = "TORCHELASTIC_USE_AGENT_STORE"
# The loopback port of the store that this node's agent serves to the ranks.
RANKS_STORE_VAR = "ENTRYPOINT_RANKS_STORE"
# The host of rank 0, where MASTER_ADDR is the way to its store.
RANK0_HOST_VAR = "ENTRYPOINT_MASTER_ADDR"
# What torchrun sets in a rank (its manual).
TORCHRUN_VARIABLES = frozenset(
    {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    }
)


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
    agents = {AGENT_ONLY_VARS, RANKS_STORE_VAR, RANK0_HOST_VAR, *environ.get(AGENT_ONLY_VARS, "").split(",")}
    ranks_store = environ.get(RANKS_STORE_VAR)
    environ = {name: value for name, value in environ.items() if name not in agents}
    environment = {**environ, **plan.environment.variables, PLAN_VAR: plan.to_json()}
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
        environment |= {"GROUP_RANK": str(plan.nodes.node_rank), AGENT_STORE_VAR: "False"}
    if ranks_store:
        environment |= store_variables(int(ranks_store))
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


def store_variables(port: int, rank0_host: str = "") -> dict[str, str]:
    """Return the variables by which a program finds the job's store on a loopback port."""
    named = {RANK0_HOST_VAR: rank0_host} if rank0_host else {}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), AGENT_STORE_VAR: "True", **named}


def with_preload(plan: Plan, environment: dict[str, str]) -> dict[str, str]:
    """Return the environment with the plan's libraries before the user's own in LD_PRELOAD."""
    if plan.environment.preload:
        libraries = (*plan.environment.preload, environment.get("LD_PRELOAD", ""))
        environment["LD_PRELOAD"] = ":".join(filter(None, libraries))
    return environment


# How each launcher sets a variable for all ranks (its manual).
MASTER_ADDR_HINTS = {
    **dict.fromkeys(Family, "MASTER_ADDR=HOST"),
    Family.OPEN_MPI: "mpirun -x MASTER_ADDR=HOST",
    Family.HYDRA: "mpiexec -genv MASTER_ADDR HOST",
}


def require_master_addr(plan: Plan, job: Job) -> str:
    """Return the host of rank 0 that the launcher sets; raises `UserError` if it sets none."""
    if plan.rendezvous.master_addr:
        return plan.rendezvous.master_addr
    raise UserError(
        f"MASTER_ADDR is not set: {job.launcher} started ranks on several nodes without the address of rank 0. Start"
        f" them with {MASTER_ADDR_HINTS[job.family]}, the node of rank 0.",
        ExitCode.RENDEZVOUS,
    )


def master_port(job: Job, job_token: str = "") -> int:
    """Return a free port for a single rank, else the port that every rank derives from the job's id."""
    if job.world_size == 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return int(probe.getsockname()[1])
    return port_from_job_id(job.job_id or job_token)


def torchelastic_variables(plan: Plan, job: Job, local_rank: int, restart: int) -> dict[str, str]:
    """Return the variables that torchrun sets in addition to RANK and its like (its manual, environment variables)."""
    rank = plan.nodes.node_rank * plan.nodes.nproc_per_node + local_rank
    size = plan.nodes.nnodes * plan.nodes.nproc_per_node
    return {
        "GROUP_RANK": str(plan.nodes.node_rank),
        "GROUP_WORLD_SIZE": str(plan.nodes.nnodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(size),
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": str(plan.nodes.max_restarts),
        "TORCHELASTIC_RUN_ID": job.job_id or "none",
    }
