"""The nodes of a job on each of which one entrypoint was started: how many, which of them is this one, who says so.

Ranks are then ours to start on each. That is so by hand (LAUNCH_NNODES), under Kubernetes and SageMaker, and where
srun started one task on each node that is to start more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from entrypoint.core.errors import Refused, shown
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.job.detect import Job
from entrypoint.job.slurm import number
from entrypoint.settings import NODE_COUNT, NODE_RANGE, LaunchSettings


@dataclass(frozen=True)
class Nodes:
    """This node's place among the job's; `said_by` is empty where there is no other.

    `master` is the address or name of number 0 as far as it is known, `port` the one to meet it on (empty: ours to
    choose), `nproc_per_node` the ranks on each that the environment asks for, `interface` the network that it names.
    `fewest` is how many nodes are enough to go on with; of `count` that may come then, number 0 is known, the others
    are numbered as they come.
    """

    count: int = 1
    rank: int = 0
    master: str = ""
    port: str = ""
    nproc_per_node: int | None = None
    interface: str = ""
    said_by: str = ""
    fewest: int | None = None


def read_nodes(settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job) -> Nodes:
    """Return this node's place; raises `Refused` where two say different things or one cannot be read.

    A launcher that has started this process as one of several ranks knows better than all but a person.
    """
    claims = list(claimed(settings, environ, job))
    if not claims:
        return Nodes()
    first = claims[0]
    for other in claims[1:]:
        if (first.count, first.rank) != (other.count, other.rank):
            raise Refused(
                f"{first.said_by} and {other.said_by} contradict each other: node {first.rank} of {first.count}, and"
                f" node {other.rank} of {other.count}; drop one of the two"
            )
    return first


def claimed(settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job) -> Iterator[Nodes]:
    """Yield what each that has a say says, a person first."""
    values = settings.values
    if values.nnodes != "1" or values.node_rank:
        yield by_person(settings, environ, job)
    if job.starts_own(values):
        yield Nodes(job.world_size, job.rank, master_of(environ, job), environ.get("MASTER_PORT", ""), said_by="srun")
    elif not job.launcher:
        if environ.get("PET_NNODES") and (environ.get("PET_NODE_RANK") or ":" in environ["PET_NNODES"]):
            yield by_kubernetes(environ)
        if environ.get("SM_HOSTS") and environ.get("SM_CURRENT_HOST"):
            yield by_sagemaker(environ)


def by_person(settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job) -> Nodes:
    """Return the place that LAUNCH_NNODES and LAUNCH_NODE_RANK give."""
    values = settings.values
    if job.launcher and not job.starts_own(values):
        raise Refused(
            f"LAUNCH_NNODES={values.nnodes}: {job.launcher} has started this process and says where it stands; unset it"
        )
    said_by = settings.sources.get("nnodes") or settings.sources["node_rank"]
    fewest, count = node_range(values.nnodes, said_by)
    if values.node_rank >= count:
        raise Refused(f"LAUNCH_NODE_RANK={values.node_rank}: there are LAUNCH_NNODES={count} nodes, counted from 0")
    if not environ.get("MASTER_ADDR"):
        raise Refused(
            f"LAUNCH_NNODES={values.nnodes}: needs MASTER_ADDR, the name or address of the node of LAUNCH_NODE_RANK=0"
        )
    master, port = environ["MASTER_ADDR"], environ.get("MASTER_PORT", "")
    return Nodes(count, values.node_rank, master, port, said_by=said_by, fewest=fewest)


def by_kubernetes(environ: Mapping[str, str]) -> Nodes:
    """Return the place that Kubeflow's operator gives in torchrun's own variables, PET_<OPTION> (torchrun's manual)."""
    text = environ["PET_NNODES"]
    said_by = f"PET_NNODES={shown(text)}"
    if not re.fullmatch(f"{NODE_COUNT}|{NODE_RANGE}", text):
        raise Refused(f"{said_by}: not a number of nodes; Kubernetes sets it, so unset it if you did")
    fewest, count = node_range(text, said_by)
    each = environ.get("PET_NPROC_PER_NODE", "")
    met, _, met_port = environ.get("PET_RDZV_ENDPOINT", "").partition(":")
    master = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or met
    port = environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT") or met_port
    need_master(master, count, said_by)
    # Elastic pods have no number; a pod's host name is its own, and a service of that name leads to it.
    first = environ.get("HOSTNAME", "").partition(".")[0] == master.partition(".")[0]
    rank = number(environ, "PET_NODE_RANK", 0 if first or fewest is None else 1)
    check_place("PET_NODE_RANK", rank, count, said_by)
    return Nodes(count, rank, master, port, int(each) if each.isdecimal() else None, said_by=said_by, fewest=fewest)


def by_sagemaker(environ: Mapping[str, str]) -> Nodes:
    """Return the place that SageMaker gives: its hosts in order, the first one the master (its training toolkit)."""
    text, own = environ["SM_HOSTS"], environ["SM_CURRENT_HOST"]
    try:
        hosts = [str(host) for host in json.loads(text)]
    except (ValueError, TypeError):
        raise Refused(
            f"SM_HOSTS={shown(text)}: not a JSON list of hosts; SageMaker sets it, so unset it if you did"
        ) from None
    if own not in hosts:
        raise Refused(f"SM_CURRENT_HOST={shown(own)}: not among SM_HOSTS={shown(text)}")
    hosts.sort()
    master = environ.get("MASTER_ADDR") or hosts[0]
    interface = environ.get("SM_NETWORK_INTERFACE_NAME", "")
    return Nodes(
        len(hosts),
        hosts.index(own),
        master,
        environ.get("MASTER_PORT", ""),
        interface=interface,
        said_by=f"SM_HOSTS={text}",
    )


def node_range(text: str, said_by: str) -> tuple[int | None, int]:
    """Return the fewest nodes (None: all) and the most of `4` or `1:4`; raises `Refused` for `4:1`."""
    first, _, last = text.partition(":")
    fewest, most = int(first), int(last or first)
    if fewest > most:
        raise Refused(f"{said_by}: {fewest} is more than {most}; write the fewest nodes first")
    return (fewest if fewest < most else None), most


def master_of(environ: Mapping[str, str], job: Job) -> str:
    """Return the master that a person names, else the one that the launcher's variables tell."""
    return environ.get("MASTER_ADDR") or job.master


def check_place(name: str, rank: int, count: int, said_by: str) -> None:
    """Raise `Refused` where there is no such node."""
    if not 0 <= rank < count:
        raise Refused(f"{name}={rank}: {said_by} nodes, counted from 0")


def need_master(master: str, count: int, said_by: str) -> None:
    """Raise `Refused` where several nodes have no master to meet at."""
    if count > 1 and not master:
        raise Refused(f"{said_by}: needs MASTER_ADDR, the name or address of the first node")
