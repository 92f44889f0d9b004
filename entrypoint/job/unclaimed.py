"""Find variables of a launcher that say there are several ranks, although no launcher could be detected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from entrypoint.core.errors import printable, refuse_if
from entrypoint.core.files import read_regular
from entrypoint.core.network import is_loopback_name

# A number above 1 means several ranks, or several nodes.
TORCH_SIZE_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "PET_NNODES")
SIZE_VARIABLES = (
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "PMI_SIZE",
    "PMI_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PALS_LOCAL_SIZE",
    "FLUX_JOB_SIZE",
    "JSM_NAMESPACE_SIZE",
    "JSM_NAMESPACE_LOCAL_SIZE",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_SIZE",
    "PBS_TASKNUM",  # 1 in the batch script, more in what pbsdsh starts
)
# A number above 0 means that there is a rank, or node, before this one.
TORCH_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "PET_NODE_RANK")
RANK_VARIABLES = (
    "PMI_RANK",
    "PMI_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "PALS_RANKID",
    "PALS_LOCAL_RANKID",
    "FLUX_TASK_RANK",
    "FLUX_TASK_LOCAL_ID",
    "JSM_NAMESPACE_RANK",
    "JSM_NAMESPACE_LOCAL_RANK",
    "HOROVOD_RANK",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_CROSS_RANK",
    "PBS_NODENUM",
    # Of a step of srun whose SLURM_STEP_ID did not get here, as into a container; a batch script has 0 in each.
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
# With a SLURM_PROCID and without a job, which a batch script has, these are a step's.
SLURM_SIZES = ("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NNODES", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")
# Set only in the ranks or pods of a job, and without their number: LSF_PM_TASKID is blaunch's, K_MPI_JOB_ROLE MPIJob's.
LAUNCHER_ONLY_VARIABLES = (
    *("PMIX_RANK", "ALPS_APP_PE", "PALS_RANKID", "LSF_PM_TASKID", "K_MPI_JOB_ROLE"),
    *("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "FLUX_TASK_RANK", "JSM_NAMESPACE_RANK"),
)
# Of any engine: a number of nodes, and which of them this is, in variables that begin alike (DSTACK_NODES_NUM).
NODE_COUNT = re.compile(
    "(.*_)?(NODES_NUM|NUM_NODES|NODE_NUM|NODE_COUNT|NNODES|NUM_WORKERS|WORKER_NUM|TOTAL_WORKERS|REPLICA_COUNT|GROUP_SIZE"
    "|TASK_COUNT)"
)
NODE_PLACES = (
    *("NODE_RANK", "NODE_INDEX", "WORKER_INDEX", "TASK_INDEX", "INDEX", "RANK"),
    *("REPLICA_RANK", "ROLE_INDEX"),  # Beaker, Volcano Engine
)
# The same for engines that name them otherwise, and the rank alone.
NODE_SIZES = ("AWS_BATCH_JOB_NUM_NODES", "_CONDOR_NPROCS", "PJM_NODE")
NODE_RANKS = ("AWS_BATCH_JOB_NODE_INDEX", "_CONDOR_PROCNO")
# The number of pods of each task of a Volcano job (its svc plugin).
VOLCANO_SIZE = re.compile("VC_.+_NUM")
# Lists of hosts, and files with one on each line; in such a job the first host starts the others.
HOST_LISTS = ("SM_HOSTS", "AZ_BATCH_HOST_LIST", "AZ_BATCH_NODE_LIST")
HOST_FILES = ("OAR_NODE_FILE", "OAR_NODEFILE", "COBALT_NODEFILE", "PJM_O_NODEINF")
# Of schedulers that we know, where what names the nodes did not get here: numbers, lists and files.
LOST_SIZES, LOST_LISTS = ("NHOSTS", "PBS_NUM_NODES"), ("LSB_HOSTS",)
LOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE")
SLURM_NODES = ("SLURM_JOB_NUM_NODES", "SLURM_NNODES")
# JSON with the tasks of a cluster (Vertex AI, TensorFlow).
CLUSTER_VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")


def unclaimed_rank_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield `NAME=VALUE` of each variable that says there are other ranks."""
    sizes, ranks = (*TORCH_SIZE_VARIABLES, *SIZE_VARIABLES), (*TORCH_RANK_VARIABLES, *RANK_VARIABLES)
    yield from numbers_above(environ, ((sizes, 1), (ranks, 0), (SLURM_SIZES if environ.get("SLURM_PROCID") else (), 1)))
    alone = () if environ.get("PMI_SIZE") else ("PMI_RANK",)
    yield from (
        f"{name}={printable(environ[name])}" for name in (*LAUNCHER_ONLY_VARIABLES, *alone) if environ.get(name)
    )
    for name in CLUSTER_VARIABLES:
        count = count_cluster_tasks(environ.get(name, ""))
        if count > 1:
            yield f"{name} (with {count} tasks)"


def numbers_above(environ: Mapping[str, str], limits: Sequence[tuple[tuple[str, ...], int]]) -> Iterator[str]:
    """Yield `NAME=VALUE` of each variable with a number above its limit, or with anything else."""
    for names, limit in limits:
        for name in names:
            text = environ.get(name, "").strip()
            if text and not (text.isdecimal() and text.isascii() and int(text[:9]) <= limit):
                yield f"{name}={printable(text)}"


def unclaimed_nodes(environ: Mapping[str, str], nodes: int) -> Iterator[str]:
    """Yield `NAME=VALUE` of each variable that says there are other nodes, and that no engine we know has set.

    `nodes` is the number of those that a scheduler names, 0 for none.
    """
    sizes = (*NODE_SIZES, *LOST_SIZES, *(SLURM_NODES if environ.get("SLURM_JOB_ID") else ()))
    yield from numbers_above(environ, ((NODE_SIZES if nodes else sizes, 1), (NODE_RANKS, 0)))
    pods = {name: text for name, text in environ.items() if VOLCANO_SIZE.fullmatch(name)}
    if sum(int(text) for text in pods.values() if re.fullmatch("[0-9]{1,6}", text)) > 1:
        yield from (f"{name}={printable(text)}" for name, text in pods.items())
    for name, text in environ.items():
        counted = NODE_COUNT.fullmatch(name)
        if not counted or not re.fullmatch("[0-9]{1,6}", text) or int(text) < 2:
            continue
        prefix = counted[1] or ""
        places = ("NODE_RANK", *(f"{prefix}{place}" for place in NODE_PLACES))
        if (prefix or "NODE" in name) and any(map(environ.get, places)):
            yield f"{name}={text}"
    counts, master = [text for name, text in environ.items() if NODE_COUNT.fullmatch(name)], environ.get("MASTER_ADDR")
    # Lightning's, and ours without the number of nodes.
    places = ("NODE_RANK", "LAUNCH_NODE_RANK", *(() if environ.get("WORLD_SIZE") else ("RANK", "GROUP_RANK")))
    place = next((name for name in places if environ.get(name)), "")
    if master and place and not is_loopback_name(master) and "1" not in counts:
        yield f"{place}={printable(environ[place])} and MASTER_ADDR={printable(master)}"
    for name in HOST_LISTS if nodes else (*HOST_LISTS, *LOST_LISTS):
        hosts = set(re.split("[,; ]", environ.get(name, "")))
        if len(hosts) > 1:
            yield f"{name}={printable(environ[name])}"
    for name in HOST_FILES if nodes else (*HOST_FILES, *LOST_FILES):
        with suppress(OSError, ValueError):
            if environ.get(name) and len(set(read_regular(environ[name]).split("\n")) - {""}) > 1:
                yield f"{name}={printable(environ[name])}"


def count_cluster_tasks(text: str) -> int:
    """Return the number of tasks in `{"cluster": {"worker": ["a:1", "b:1"]}}`; 0 for anything else."""
    try:
        return sum(len(tasks) for tasks in json.loads(text)["cluster"].values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def without_batch_exports(environ: Mapping[str, str], nodes: int) -> dict[str, str]:
    """Return the environment without variables that say nothing about this process in a job of Slurm.

    A batch script may export torchrun's variables for its own srun line: on several `nodes` the entrypoint starts srun
    and replaces them. A shell that srun started (only then is there a step here) has the variables of its PMI. A job
    submitted from such a shell may inherit PMIX_RANK=0.
    """
    if not environ.get("SLURM_JOB_ID"):
        return dict(environ)
    names = {"WORLD_SIZE"} if nodes < 2 else set()
    if not nodes:
        names |= {"SLURM_JOB_ID", *SLURM_NODES}
    if not environ.get("SLURM_STEP_ID"):
        names |= {*SIZE_VARIABLES, *RANK_VARIABLES}
        names |= {name for name in LAUNCHER_ONLY_VARIABLES if environ.get(name) != "0"}
    return {name: value for name, value in environ.items() if name in names}


def check_unclaimed_ranks(environ: Mapping[str, str], nproc: int | None, nodes: int) -> None:
    """Raise `UserError` for the first of those variables: each process would train alone as rank 0 of 1.

    A WORLD_SIZE equal to the user's `nproc`, the ranks to start here, is no contradiction.
    """
    meant = without_batch_exports(environ, nodes)
    node, rank = next(unclaimed_nodes(meant, nodes), ""), next(unclaimed_rank_variables(meant), "")
    refuse_if(
        {
            f"{node}: this job has other nodes, which would train alone. On each node set LAUNCH_NNODES to their"
            " number, LAUNCH_NODE_RANK counted from 0, and MASTER_ADDR to the first one's name. Or list them once in"
            " LAUNCH_HOSTS. If each is to train alone, set LAUNCH_LAUNCHER=direct.": node,
            f"{rank}: a launcher has several ranks here, and its other variables do not say which rank this is. Set"
            " RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR. To start N ranks here, unset it and set"
            " LAUNCH_NPROC_PER_NODE=N. To train alone, set LAUNCH_LAUNCHER=direct.": (
                rank and rank != f"WORLD_SIZE={nproc}"
            ),
        }
    )
