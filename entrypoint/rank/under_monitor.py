"""Runs a rank's program under a monitor, if the monitors of the job can find each other."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from typing import NoReturn

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.network import addresses_towards, is_own_address, resolve
from entrypoint.core.packages import PROJECT, package_version
from entrypoint.core.process import resume_gc
from entrypoint.job.detect import Job
from entrypoint.job.job_key import JOB_KEY_VAR, KeySource
from entrypoint.job.launchers import Family
from entrypoint.job.run_identity import PROGRAM
from entrypoint.plan.model import Plan
from entrypoint.rank.environment import AGENT_STORE_VAR, MASTER_ADDR_HINTS, store_variables
from entrypoint.rank.refusal import Place, endpoint_of, job_access, refuse, run_token
from entrypoint.supervise.failure_channel import FailureChannel, Rank0, StorePlace
from entrypoint.supervise.monitor import kill_stuck_launchers, run_guarded
from entrypoint.supervise.store_door import listen_on_loopback


def run_under_monitor(plan: Plan, job: Job, environment: Mapping[str, str]) -> NoReturn:
    """Run the program under a monitor; all monitors of the job connect to the master, above the ranks' own ports."""
    check_master(plan, job, environment)
    port, derived = int(environment["MASTER_PORT"]), has_derived_port(plan)
    is_unique = not derived or not plan.rendezvous.run_identity.startswith(PROGRAM)
    source = KeySource(plan.rendezvous.key_source, plan.rendezvous.key_file)
    access = job_access(source, job, environment, on_one_node=job.on_one_node)
    environment = {name: value for name, value in environment.items() if name != JOB_KEY_VAR}
    # A user's own torchrun has a store, which its agent serves.
    programs = None if environment.get(AGENT_STORE_VAR) == "True" else listen_on_loopback()
    endpoint = replace(
        endpoint_of(job.rank, environment["MASTER_ADDR"], port, rank_token(plan, environment)),
        world_size=job.world_size,
        version=package_version(PROJECT),
        is_unique=is_unique,
        local_rank=job.local_rank,
        # Two runs of one command by hand have the same identity, and must not share a connection.
        shares_connection=is_unique and job.local_world_size > 1,
    )
    interface = environment.get("GLOO_SOCKET_IFNAME", "")
    channel = FailureChannel(
        endpoint,
        plan.collective_timeout_s,
        access=access,
        store=StorePlace(programs, port, plan.rendezvous.timeout_s, derived) if programs else None,
        rank0=Rank0(
            others=job.world_size - 1,
            nodes=-(-job.world_size // job.local_world_size) if endpoint.shares_connection else 0,
            addresses=addresses_towards(environment["MASTER_ADDR"], interface) if job.rank == 0 else (),
        ),
    )
    if programs:
        environment |= store_variables(programs.getsockname()[1], environment["MASTER_ADDR"])
    sys.stdout.flush()
    sys.stderr.flush()
    resume_gc()
    run_guarded(
        plan.program.argv,
        environment,
        channel,
        plan.rendezvous.timeout_s,
        plan.grace_period_s,
        handles_preemption=plan.program.kind == "train",
    )


def has_derived_port(plan: Plan) -> bool:
    """Return whether the ranks' port comes from the job's id, and not from the user, a platform or an agent."""
    return plan.rendezvous.port_is_derived and not plan.uses_elastic_rendezvous


def rank_token(plan: Plan, environment: Mapping[str, str]) -> str:
    """Return what the monitors of this run have in common."""
    return run_token(int(environment["MASTER_PORT"]), plan.rendezvous.run_identity, derived=has_derived_port(plan))


def master_problem(job: Job, address: str) -> UserError | None:
    """Return the error for rank 0's MASTER_ADDR where it is another machine's address."""
    if is_own_address(resolve(address)):
        return None
    node = socket.gethostname()
    hint = MASTER_ADDR_HINTS[job.family].replace("HOST", node)
    return UserError(
        f"MASTER_ADDR={printable(address)}: is another machine's address, and rank 0 is on {node}. Start the ranks with"
        f" {hint}, or start rank 0 there.",
        ExitCode.RENDEZVOUS,
    )


def check_master(plan: Plan, job: Job, environment: Mapping[str, str]) -> None:
    """Raise `UserError` on rank 0, and tell the other nodes, if MASTER_ADDR is another machine's address.

    A port that the user or platform sets may lead here from another address, as a Kubernetes service's does.
    """
    if job.rank or not has_derived_port(plan) or not (error := master_problem(job, environment["MASTER_ADDR"])):
        return
    place = Place(
        endpoint=endpoint_of(
            0, environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), rank_token(plan, environment)
        ),
        others=0,
        identity=plan.rendezvous.run_identity,
        job=job,
        environ=environment,
        on_one_node=job.on_one_node,
    )
    by_hand = plan.nodes.nnodes > 1  # then another node may be rank 0's; a launcher ends its other ranks
    if job.family == Family.HYDRA and not job.on_one_node:  # hydra does not, unless its own process ends
        kill_stuck_launchers()
    refuse(place if by_hand or job.on_one_node else None, error, listens=job.on_one_node)
