"""Read the nodes of a job from what clouds give each node: SageMaker, Vertex AI, and engines with plain variables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import read_regular
from entrypoint.job.node_group import NodeGroup, claim_node
from entrypoint.job.slurm import number

# What a container of SageMaker has without its training toolkit ("How SageMaker provides training information").
RESOURCE_CONFIG = Path("/opt/ml/input/config/resourceconfig.json")


def from_sagemaker(environ: Mapping[str, str]) -> Iterator[NodeGroup]:
    """Yield the node group of a SageMaker job; the first of its sorted hosts is the master (its training toolkit).

    The toolkit sets SM_HOSTS. An image without it has `resourceconfig.json`. Raises `UserError` if it is invalid.
    """
    if environ.get("SM_HOSTS") and environ.get("SM_CURRENT_HOST"):
        text, own, source = environ["SM_HOSTS"], environ["SM_CURRENT_HOST"], f"SM_HOSTS={environ['SM_HOSTS']}"
        hosts, interface = read_json("SM_HOSTS", text, list), environ.get("SM_NETWORK_INTERFACE_NAME", "")
        named, listed = "SM_CURRENT_HOST", source
    elif environ.get("TRAINING_JOB_NAME") and not environ.get("SM_HOSTS"):
        try:
            text = read_regular(RESOURCE_CONFIG)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UserError(
                f"TRAINING_JOB_NAME={printable(environ['TRAINING_JOB_NAME'])}: {RESOURCE_CONFIG} with the job's"
                f" hosts cannot be read ({error.strerror}). Set LAUNCH_NNODES, LAUNCH_NODE_RANK and MASTER_ADDR.",
                ExitCode.MACHINE,
            ) from None
        config = read_json(str(RESOURCE_CONFIG), text, dict)
        own, source, named = str(config.get("current_host", "")), str(RESOURCE_CONFIG), "current_host"
        listed = f"the hosts of {source}"
        hosts, interface = config.get("hosts"), str(config.get("network_interface_name") or "")
    else:
        return
    if not isinstance(hosts, list) or own not in map(str, hosts):
        raise UserError(f"{named}={printable(own)}: not among {printable(listed)}")
    names = sorted(map(str, hosts))
    yield replace(claim_node(environ, len(names), names.index(own), named, names[0], source), interface=interface)


# Pools of parameter or reduction servers, and of evaluators (Vertex AI, "Distributed training").
OTHER_POOLS = ("workerpool2", "workerpool3")


def from_vertex(environ: Mapping[str, str]) -> Iterator[NodeGroup]:
    """Yield the node group of a Vertex AI job: its primary replica is node 0, its workers are the others.

    CLUSTER_SPEC holds `{"cluster": {"workerpool0": ["host:2222"], …}, "task": {"type": "workerpool0", "index": 0}}`.
    Raises `UserError` if it is invalid, or if this replica is a server or an evaluator.
    """
    text = environ.get("CLUSTER_SPEC", "")
    if "workerpool0" not in text:
        return
    spec = read_json("CLUSTER_SPEC", text, dict)
    pools, task = spec.get("cluster"), spec.get("task")
    try:
        first, workers = list(pools["workerpool0"]), list(pools.get("workerpool1", []))
        pool, index = str(task["type"]), int(task["index"])
    except (TypeError, KeyError, ValueError, AttributeError):
        raise UserError(f"CLUSTER_SPEC={printable(text)}: has no cluster or no task. Vertex AI sets it.") from None
    if pool in OTHER_POOLS:
        raise UserError(
            f"CLUSTER_SPEC: this is {printable(pool)}, a pool of servers or evaluators, which do not train. Put the"
            " nodes that train into the first two worker pools."
        )
    rank = index if pool == "workerpool0" else len(first) + index
    master = str(first[0] if first else "").partition(":")[0]
    yield claim_node(environ, len(first) + len(workers), rank, "CLUSTER_SPEC's task", master, "CLUSTER_SPEC")


# The variables in which an engine says how many nodes a task has, which one this is, and where the first one is. The
# last is made of variables in braces; of several addresses the first one counts.
# From each engine's own documents or source; tests/entrypoint/job/documented.json names them.
ENGINES = (
    ("SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK", "{SKYPILOT_NODE_IPS}"),
    ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK", "{DSTACK_MASTER_NODE_IP}"),
    ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX", "{LWS_LEADER_ADDRESS}"),
    ("MF_PARALLEL_NUM_NODES", "MF_PARALLEL_NODE_INDEX", "{MF_PARALLEL_MAIN_IP}"),
    ("LEPTON_JOB_TOTAL_WORKERS", "LEPTON_JOB_WORKER_INDEX", "{LEPTON_JOB_WORKER_PREFIX}-0.{LEPTON_SUBDOMAIN}"),
    ("NGC_ARRAY_SIZE", "NGC_ARRAY_INDEX", "{NGC_MASTER_ADDR}"),
)


def from_engines(environ: Mapping[str, str]) -> Iterator[NodeGroup]:
    """Yield the node group of each engine that gives a count above 1 and the rank of this node.

    Raises `UserError` for a rank that is out of range, and without an address.
    """
    for count_name, rank_name, form in ENGINES:
        count = number(environ, count_name, 1)
        if count < 2 or not environ.get(rank_name):
            continue
        known = form.format_map(environ) if all(map(environ.get, re.findall("{(.+?)}", form))) else ""
        rank, master = number(environ, rank_name, 0), next(iter(known.split()), "")
        yield claim_node(environ, count, rank, rank_name, master, f"{count_name}={count}")


def read_json(name: str, text: str, kind: type) -> Any:
    """Return a JSON value of this type; raises `UserError` for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        form = "list of hosts" if kind is list else "object"
        raise UserError(f"{name}={printable(text)}: not a JSON {form}. The platform sets it, so unset it if you did.")
    return value
