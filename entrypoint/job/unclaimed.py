"""Find variables of a launcher that say there are several ranks, although no launcher could be detected."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

from entrypoint.core.errors import UserError, printable

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
    "AWS_BATCH_JOB_NUM_NODES",
    "_CONDOR_NPROCS",
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
    "AWS_BATCH_JOB_NODE_INDEX",
    "PBS_NODENUM",
    "_CONDOR_PROCNO",
)
# Set only in the ranks or pods of a job, and without their number: LSF_PM_TASKID is blaunch's, K_MPI_JOB_ROLE MPIJob's.
LAUNCHER_ONLY_VARIABLES = ("PMIX_RANK", "ALPS_APP_PE", "PALS_RANKID", "LSF_PM_TASKID", "K_MPI_JOB_ROLE")
# The number of pods of each task of a Volcano job (its svc plugin).
VOLCANO_SIZE = re.compile("VC_.+_NUM")
# JSON with the tasks of a cluster (Vertex AI, TensorFlow).
CLUSTER_VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")


def unclaimed_rank_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield `NAME=VALUE` of each variable that says there are other ranks."""
    sizes, ranks = (*TORCH_SIZE_VARIABLES, *SIZE_VARIABLES), (*TORCH_RANK_VARIABLES, *RANK_VARIABLES)
    for names, single in ((sizes, 1), (ranks, 0)):
        for name in names:
            text = environ.get(name, "").strip()
            if text and not (text.isdecimal() and text.isascii() and int(text[:9]) <= single):
                yield f"{name}={printable(text)}"
    yield from (f"{name}={printable(environ[name])}" for name in LAUNCHER_ONLY_VARIABLES if environ.get(name))
    for name in CLUSTER_VARIABLES:
        count = count_cluster_tasks(environ.get(name, ""))
        if count > 1:
            yield f"{name} (with {count} tasks)"
    pods = {name: text for name, text in environ.items() if VOLCANO_SIZE.fullmatch(name)}
    if sum(int(text) for text in pods.values() if re.fullmatch("[0-9]{1,6}", text)) > 1:
        yield from (f"{name}={printable(text)}" for name, text in pods.items())
    hosts = environ.get("SM_HOSTS", "")
    if "," in hosts:
        yield f"SM_HOSTS={printable(hosts)}"


def count_cluster_tasks(text: str) -> int:
    """Return the number of tasks in `{"cluster": {"worker": ["a:1", "b:1"]}}`; 0 for anything else."""
    try:
        cluster = json.loads(text)["cluster"]
        return sum(len(tasks) for tasks in cluster.values())
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
    if not environ.get("SLURM_STEP_ID"):
        names |= {*SIZE_VARIABLES, *RANK_VARIABLES}
        names |= {name for name in LAUNCHER_ONLY_VARIABLES if environ.get(name) != "0"}
    return {name: value for name, value in environ.items() if name in names}


def check_unclaimed_ranks(environ: Mapping[str, str], nproc: int | None, nodes: int) -> None:
    """Raise `UserError` for the first of those variables: each process would train alone as rank 0 of 1.

    A WORLD_SIZE equal to the user's `nproc`, the ranks to start here, is no contradiction.
    """
    found = next(unclaimed_rank_variables(without_batch_exports(environ, nodes)), "")
    if found and found != f"WORLD_SIZE={nproc}":
        raise UserError(
            f"{found}: a launcher has several ranks here, and its other variables do not say which rank this is."
            " Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR. To start N ranks here, unset it and"
            " set LAUNCH_NPROC_PER_NODE=N. To train alone, set LAUNCH_LAUNCHER=direct."
        )
