"""Find variables of a launcher that say there are several ranks, although no launcher could be detected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from entrypoint.core.errors import UserError, printable

# A number above 1 means several ranks, or several nodes.
SIZE_VARIABLES = (
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    *("MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE", "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    *("PALS_LOCAL_SIZE", "FLUX_JOB_SIZE", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "PET_NNODES"),
)
# A number above 0 means that there is a rank, or node, before this one.
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "NODE_RANK", "PET_NODE_RANK", "PMI_RANK", "PMI_LOCAL_RANK"),
    *("MPI_LOCALRANKID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_RANK"),
    *("MV2_COMM_WORLD_LOCAL_RANK", "PALS_RANKID", "PALS_LOCAL_RANKID", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"),
    *("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)
# Set only in the ranks of a launcher, and without their number.
LAUNCHER_ONLY_VARIABLES = ("PMIX_RANK", "ALPS_APP_PE")
# JSON with the tasks of a cluster (Vertex AI, TensorFlow).
CLUSTER_VARIABLES = ("CLUSTER_SPEC", "TF_CONFIG")


def unclaimed_rank_variables(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield `NAME=VALUE` of each variable that says there are other ranks."""
    for names, single in ((SIZE_VARIABLES, 1), (RANK_VARIABLES, 0)):
        for name in names:
            text = environ.get(name, "").strip()
            if text and not (text.isdecimal() and text.isascii() and int(text[:9]) <= single):
                yield f"{name}={printable(text)}"
    yield from (f"{name}={printable(environ[name])}" for name in LAUNCHER_ONLY_VARIABLES if environ.get(name))
    for name in CLUSTER_VARIABLES:
        count = count_cluster_tasks(environ.get(name, ""))
        if count > 1:
            yield f"{name} (with {count} tasks)"


def count_cluster_tasks(text: str) -> int:
    """Return the number of tasks in `{"cluster": {"worker": ["a:1", "b:1"]}}`; 0 for anything else."""
    try:
        cluster = json.loads(text)["cluster"]
        return sum(len(tasks) for tasks in cluster.values())
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return 0


def check_unclaimed_ranks(environ: Mapping[str, str], nproc: int | None, nodes: int) -> None:
    """Raise `UserError` for the first of those variables: each process would train alone as rank 0 of 1.

    A WORLD_SIZE equal to the user's `nproc`, the ranks to start here, is no contradiction. A batch script of Slurm may
    export such variables for its own srun line: on several `nodes` the entrypoint starts srun and replaces them.
    """
    if environ.get("SLURM_JOB_ID"):
        environ = {"WORLD_SIZE": environ.get("WORLD_SIZE", "")} if nodes < 2 else {}
    found = next(unclaimed_rank_variables(environ), "")
    if found and found != f"WORLD_SIZE={nproc}":
        raise UserError(
            f"{found}: a launcher has several ranks here, and its other variables do not say which rank this is."
            " Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR. To start N ranks here, unset it and"
            " set LAUNCH_NPROC_PER_NODE=N. To train alone, set LAUNCH_LAUNCHER=direct."
        )
