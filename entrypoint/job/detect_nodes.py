"""Detect the nodes of a job with one entrypoint per node: their number and the rank of this node.

The entrypoint then starts the ranks on each node. Sources are LAUNCH_NNODES, Kubernetes, the clouds, srun with one
task per node, and pods that get RANK and WORLD_SIZE without LOCAL_RANK.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from entrypoint.core.errors import UserError, printable, refuse_if
from entrypoint.core.network import is_loopback_name
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.job.cloud_nodes import from_engines, from_sagemaker, from_vertex
from entrypoint.job.detect import Job
from entrypoint.job.node_group import NodeGroup, claim_node, parse_port
from entrypoint.job.slurm import number
from entrypoint.job.unclaimed import check_unclaimed_ranks
from entrypoint.settings import NODE_COUNT, NODE_RANGE, LaunchSettings

# The index of a pod of a Kubernetes Indexed Job, which a JobSet makes too.
POD_INDEX = "JOB_COMPLETION_INDEX"


def detect_node_group(settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job) -> NodeGroup:
    """Return this node's group; raises `UserError` if two sources contradict each other or one is invalid.

    Settings of the user take precedence over a launcher that started this process as one of several ranks.
    """
    claims = list(node_group_claims(settings, environ, job))
    free = settings.values.launcher == "auto" and not settings.values.hosts
    if not claims and job.launcher is None and free:
        nproc = settings.values.nproc_per_node
        check_unclaimed_ranks(environ, None if nproc == "auto" else nproc, len(job.hostnames))
        # Kubernetes does not tell a pod of an Indexed Job how many there are, and they may be ranks of one job.
        if environ.get(POD_INDEX) and "nnodes" not in settings.sources:
            raise UserError(
                f"{POD_INDEX}={printable(environ[POD_INDEX])}: this pod does not say whether the pods of its Job train"
                " together. Set LAUNCH_NNODES to the number of pods and MASTER_ADDR to the first one's name, or"
                " LAUNCH_NNODES=1 if each trains alone."
            )
    first = claims[0] if claims else NodeGroup()
    source = settings.sources.get("nnodes", "") if settings.values.nnodes == "1" else ""
    for other in (*claims[1:], *([NodeGroup(source=source)] if source else ())):
        if (first.nnodes, first.node_rank) != (other.nnodes, other.node_rank):
            raise UserError(
                f"{first.source} and {other.source} contradict each other: node {first.node_rank} of {first.nnodes}"
                f" and node {other.node_rank} of {other.nnodes}. Drop one of the two."
            )
    ranks_are_mine = job.launcher is None or job.starts_ranks_itself(settings.values)
    if ranks_are_mine and settings.values.launcher != "direct":
        return replace(first, nproc_per_node=platform_nproc(environ))
    return first


def platform_nproc(environ: Mapping[str, str]) -> int | None:
    """Return the ranks per node by torchrun's variable, None where it leaves the number open; raises `UserError`."""
    text = environ.get("PET_NPROC_PER_NODE", "")
    if text in ("", "auto", "gpu", "cpu", "xpu"):
        return None
    if not re.fullmatch(NODE_COUNT, text):
        raise UserError(
            f"PET_NPROC_PER_NODE={printable(text)}: not a number of ranks. Set a number from 1, or auto, or unset it."
        )
    return int(text)


def node_group_claims(
    settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job
) -> Iterator[NodeGroup]:
    """Yield the node group of each source, the user's settings first."""
    values = settings.values
    if values.nnodes != "1" or values.node_rank:
        yield from_settings(settings, environ, job)
    if job.starts_ranks_itself(values):
        master = environ.get("MASTER_ADDR") or job.master_addr
        yield NodeGroup(job.world_size, job.rank, master, environ.get("MASTER_PORT", ""), source="srun")
    elif not job.launcher and values.launcher not in ("direct", "mpirun", "srun") and not values.hosts:
        if environ.get("PET_NNODES") and (environ.get("PET_NODE_RANK") or ":" in environ["PET_NNODES"]):
            yield from_kubernetes(environ)
        yield from from_sagemaker(environ)
        yield from from_vertex(environ)
        yield from from_engines(environ)
        yield from from_pods(environ, settings)


def from_settings(settings: ParsedSettings[LaunchSettings], environ: Mapping[str, str], job: Job) -> NodeGroup:
    """Return the node group that LAUNCH_NNODES and LAUNCH_NODE_RANK give."""
    values = settings.values
    if job.launcher and not job.starts_ranks_itself(values):
        raise UserError(
            f"LAUNCH_NNODES={values.nnodes}: {job.launcher} has started this process and says where it stands; unset it"
        )
    source = settings.sources.get("nnodes") or settings.sources["node_rank"]
    min_nodes, count = node_range(values.nnodes, source)
    node_rank, named = values.node_rank, "LAUNCH_NODE_RANK"
    if "node_rank" not in settings.sources and environ.get(POD_INDEX):
        node_rank, named = number(environ, POD_INDEX, 0), POD_INDEX
    refuse_if(
        {
            f"{named}={node_rank}: there are LAUNCH_NNODES={count} nodes, counted from 0": not 0 <= node_rank < count,
            f"LAUNCH_NNODES={values.nnodes}: needs MASTER_ADDR, the name or address of the node of"
            " LAUNCH_NODE_RANK=0": not environ.get("MASTER_ADDR"),
        }
    )
    master, port = environ["MASTER_ADDR"], environ.get("MASTER_PORT", "")
    return NodeGroup(count, node_rank, master, port, source=source, min_nodes=min_nodes)


def from_kubernetes(environ: Mapping[str, str]) -> NodeGroup:
    """Return the node group from the PET_<OPTION> variables of Kubeflow's operator (torchrun's manual)."""
    text = environ["PET_NNODES"]
    source = f"PET_NNODES={printable(text)}"
    if not re.fullmatch(f"{NODE_COUNT}|{NODE_RANGE}", text):
        raise UserError(f"{source}: not a number of nodes; Kubernetes sets it, so unset it if you did")
    min_nodes, count = node_range(text, source)
    met, met_port = split_endpoint(environ.get("PET_RDZV_ENDPOINT", ""))
    master = environ.get("MASTER_ADDR") or environ.get("PET_MASTER_ADDR") or met
    named = next((name for name in ("MASTER_PORT", "PET_MASTER_PORT") if environ.get(name)), "PET_RDZV_ENDPOINT")
    port = environ.get("MASTER_PORT") or environ.get("PET_MASTER_PORT") or met_port
    if port:
        parse_port(port, f"{named}={environ[named]}")
    # Elastic pods have no index. A pod's host name is also the name of its service.
    first = environ.get("HOSTNAME", "").partition(".")[0] == master.partition(".")[0]
    rank = number(environ, "PET_NODE_RANK", 0 if first or min_nodes is None else 1)
    group = claim_node(environ, count, rank, "PET_NODE_RANK", master, source)
    return replace(group, port=port, min_nodes=min_nodes)


def split_endpoint(text: str) -> tuple[str, str]:
    """Return host and port (empty: none) of `host`, `host:29500` or `[::1]:29500`, as torchrun reads them."""
    host, _, port = text.rpartition(":") if ":" in text and not text.endswith("]") else (text, "", "")
    return host.removeprefix("[").removesuffix("]"), port


def from_pods(environ: Mapping[str, str], settings: ParsedSettings[LaunchSettings]) -> Iterator[NodeGroup]:
    """Yield the node group of pods with RANK and WORLD_SIZE only: a pod counts as a node (Volcano's pytorch plugin).

    Raises `UserError` if WORLD_SIZE may count pods or ranks.
    """
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return
    if any(environ.get(name) for name in ("PET_NNODES", "SM_HOSTS", "SLURM_JOB_ID")):
        return  # a platform that says more, or a batch script's own exports
    rank, count = number(environ, "RANK", 0), number(environ, "WORLD_SIZE", 1)
    source = f"WORLD_SIZE={count}"
    if count == 1 and rank == 0:
        return
    each = platform_nproc(environ) or 1
    if each > 1 and count > 1:
        raise UserError(
            f"{source}: PET_NPROC_PER_NODE={each} is set without PET_NNODES, so this may count pods or ranks. Set"
            " LAUNCH_NNODES and LAUNCH_NODE_RANK, and unset RANK and WORLD_SIZE."
        )
    group = claim_node(environ, count, rank, "RANK", "", source)
    master = group.master_addr
    nproc = settings.values.nproc_per_node
    if nproc not in ("auto", 1) and is_loopback_name(master):
        raise UserError(
            f"{source} and MASTER_ADDR={master}: would be {count} nodes, all of them this one. To start"
            f" {settings.sources['nproc_per_node']} ranks here, unset RANK and WORLD_SIZE. For several nodes, set"
            " MASTER_ADDR to the address of the first one."
        )
    # A loopback address means that all are on this machine. Kubeflow's pytorch-operator gives rank 0 `localhost`.
    here = is_loopback_name(master) and (rank > 0 or master != "localhost")
    yield replace(group, interface="lo" if here else "")


def node_range(text: str, source: str) -> tuple[int | None, int]:
    """Return the minimum (None: all) and the maximum number of nodes of `4` or `1:4`; raises `UserError` for `4:1`."""
    first, _, last = text.partition(":")
    min_nodes, most = int(first), int(last or first)
    if min_nodes > most:
        raise UserError(f"{source}: {min_nodes} is more than {most}. Write the smaller number first.")
    return (min_nodes if min_nodes < most else None), most
