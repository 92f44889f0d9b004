"""Reports to a job's other nodes why this one starts no ranks, so that they do not wait for it."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.console import log, report_error
from entrypoint.core.errors import ReportedError, UserError, first_line
from entrypoint.core.network import resolve
from entrypoint.job.detect import Job
from entrypoint.job.node_group import JOB_TOKEN_VAR, monitor_port, port_from_job_id
from entrypoint.job.run_identity import PROGRAM, has_monitor
from entrypoint.supervise.admission import RankEndpoint

if TYPE_CHECKING:
    from entrypoint.job.job_key import KeySource
    from entrypoint.job.node_group import NodeGroup
    from entrypoint.supervise.access import Access

# A refused node exits after this time at the latest.
REFUSAL_WAIT_S = 10.0
HEARTBEAT_TIMEOUT_S = 60


class Place(Struct, frozen=True):
    """Where a process that starts no ranks stands in a job; `others` is how many ranks or nodes rank 0 expects."""

    endpoint: RankEndpoint
    others: int
    identity: str
    job: Job
    environ: Mapping[str, str]
    on_one_node: bool = False


def endpoint_of(rank: int, host: str, port: int, token: str) -> RankEndpoint:
    """Return the endpoint of a rank, or of a node's first one, whose ranks meet on this port of rank 0's host."""
    return RankEndpoint(
        rank=rank, node=socket.gethostname(), host=host, port=monitor_port(port), token=token, pid=os.getpid()
    )


def run_token(port: int, identity: str, *, derived: bool) -> str:
    """Return what a run's monitors have in common; a port that is not derived from the job's id is the run's own."""
    return f"{port} {identity if derived or not identity.startswith(PROGRAM) else ''}"


def place_in_job(job: Job, group: NodeGroup, environ: Mapping[str, str], identity: str) -> Place | None:
    """Return where this process stands, None if the others have no monitors or it does not know where rank 0 is.

    The agents of an elastic job have no common port before they meet.
    """
    if group.nnodes == 1 and has_monitor(job, environ, identity):
        job = job if job.job_id else replace(job, job_id=environ.get(JOB_TOKEN_VAR, ""))
        rank, size, port = job.rank, job.world_size, environ.get("MASTER_PORT", "")
        master_addr = environ.get("MASTER_ADDR") or ("127.0.0.1" if job.on_one_node else job.master_addr)
    elif group.nnodes > 1 and not group.min_nodes:
        rank, size, port, master_addr = group.node_rank, group.nnodes, group.port, group.master_addr
    else:
        return None
    if not master_addr:
        return None
    number = int(port) if port.isdecimal() else port_from_job_id(job.job_id)
    return Place(
        endpoint=endpoint_of(rank, master_addr, number, run_token(number, identity, derived=not port)),
        others=size - 1,
        identity=identity,
        job=job,
        environ=environ,
        on_one_node=group.nnodes == 1 and job.on_one_node,
    )


def job_access(source: KeySource, job: Job, environ: Mapping[str, str], *, on_one_node: bool) -> Access:
    """Return who may take part in the job: monitors with its key, or this user's on one node.

    Raises `UserError` if the key cannot be read.
    """
    from entrypoint.job.job_key import key_reader
    from entrypoint.supervise.access import Access

    if on_one_node:
        return Access(own_user_only=True)
    reader = key_reader(source, environ, draws=job.rank == 0 and job.local_rank == 0)
    return Access(reader, is_drawn=source.kind == "drawn")


def refuse(place: Place | None, error: UserError, *, listens: bool = True) -> NoReturn:
    """Report an error here and to the job's other nodes, and raise it; without a place only raise it."""
    if place is None:
        raise error
    report_error(error)
    tell_other_nodes(place, error, listens=listens)
    raise ReportedError(str(error), error.code) from None


def tell_other_nodes(place: Place, error: UserError, *, listens: bool = True) -> None:
    """Tell the other monitors of the job within some seconds; rank 0 answers those that connect, if it `listens`."""
    from entrypoint.job.job_key import SECRET_FILE_VAR, find_key_source
    from entrypoint.supervise.admission import FirstFailure
    from entrypoint.supervise.failure_channel import FailureChannel, Rank0

    source = find_key_source(place.environ, place.environ.get(SECRET_FILE_VAR, ""), place.identity)
    endpoint = place.endpoint
    with suppress(OSError, UserError):  # without the key nobody listens to this node
        resolve(endpoint.host)  # raises if there is nobody to tell
        job = replace(place.job, rank=endpoint.rank)
        access = job_access(source, job, place.environ, on_one_node=place.on_one_node)
        channel = FailureChannel(
            endpoint, HEARTBEAT_TIMEOUT_S, access, rank0=Rank0(others=place.others, listens=listens)
        )
        channel.report_failure(
            FirstFailure(endpoint.rank, endpoint.node, int(error.code), first_line(error), before_start=True)
        )
        channel.start()
        channel.wait_for_others(REFUSAL_WAIT_S, lambda: False, log)
        channel.report_exit(0, "")
