"""Detect the launcher of this process and its rank in the job, with a table of one row per launcher.

The innermost launcher wins, so the rows have the order torchrun, Open MPI, MVAPICH, hydra, Slurm.
torchrun inside srun sees both, and `mpirun` inside sbatch leaves SLURM_PROCID=0 in every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from entrypoint.core.errors import UserError
from entrypoint.job.slurm import granted_cpus, job_cpus, number, slurm_nodes, slurm_tasks_here

if TYPE_CHECKING:
    from entrypoint.settings import LaunchSettings


class LauncherBinding(Enum):
    """What bound this rank to CPUs before the plan: nothing, the user or scheduler, or the launcher's default."""

    NONE = "none"
    USER = "user"
    LAUNCHER_DEFAULT = "launcher default"


@dataclass(frozen=True)
class Job:
    """The rank identity of this process; without a launcher, the user or a batch script started a single process.

    `granted_cpus` are the CPUs that the scheduler grants the ranks of this node. `node_cpus` are those that it grants
    the whole job there. `master_addr` is rank 0's host if the launcher sets it. `hostnames` are the job's nodes in
    order. Of a heterogeneous job's `het_components`, a batch script sees only the nodes of the first.
    """

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    job_id: str = ""
    cpu_binding: LauncherBinding = LauncherBinding.NONE
    granted_cpus: int | None = None
    node_cpus: int | None = None
    hostnames: tuple[str, ...] = ()
    master_addr: str = ""
    het_components: int = 1

    @property
    def on_one_node(self) -> bool:
        """Return whether every rank of the job is on this node."""
        return self.local_world_size == self.world_size

    def starts_ranks_itself(self, values: LaunchSettings) -> bool:
        """Return whether this is srun's only task on a node, and starts the ranks there itself."""
        several = values.nproc_per_node != "auto" and values.nproc_per_node > 1
        asked = (
            several
            or values.launcher in ("local", "torchrun")
            or (values.max_restarts != "auto" and values.max_restarts > 0)
        )
        return self.launcher == "srun" and self.local_world_size == 1 and asked


@dataclass(frozen=True)
class Launcher:
    """A row: concept → variable. `present` all set prove that this launcher started the process."""

    name: str
    present: tuple[str, ...]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job_id: tuple[str, ...] = ()
    local_size_of: Callable[[Mapping[str, str]], int] | None = None
    binding_of: Callable[[Mapping[str, str]], LauncherBinding] = lambda _: LauncherBinding.NONE
    master_of: Callable[[Mapping[str, str]], str] = lambda _: ""


def open_mpi_binding(environ: Mapping[str, str]) -> LauncherBinding:
    """Open MPI binds to a core up to two ranks, to a socket above; --bind-to shows in the policy (mpirun(1))."""
    policy = environ.get("OMPI_MCA_hwloc_base_binding_policy", "")
    if not policy:
        return LauncherBinding.LAUNCHER_DEFAULT
    return LauncherBinding.NONE if policy.startswith("none") else LauncherBinding.USER


def hydra_binding(environ: Mapping[str, str]) -> LauncherBinding:
    """MPICH binds where it is asked to; Intel MPI by default, unless I_MPI_PIN says no (its developer reference)."""
    if environ.get("HYDRA_USER_PROVIDED_BINDING"):
        return LauncherBinding.USER
    intel = any(name.startswith("I_MPI_") for name in environ)
    pinned = environ.get("I_MPI_PIN", "1").lower() not in ("0", "no", "off", "disable")
    if not intel or not pinned:
        return LauncherBinding.NONE
    return LauncherBinding.USER if "I_MPI_PIN_DOMAIN" in environ else LauncherBinding.LAUNCHER_DEFAULT


def srun_binding(environ: Mapping[str, str]) -> LauncherBinding:
    """Return whether srun has bound each task, as its task/affinity plugin does unless --cpu-bind=none."""
    kind = environ.get("SLURM_CPU_BIND_TYPE", "")
    return LauncherBinding.USER if kind and "none" not in kind else LauncherBinding.NONE


def open_mpi_master(environ: Mapping[str, str]) -> str:
    """Return the address of mpirun's own node, which has rank 0 unless a user's list of hosts says otherwise.

    Open MPI 4 gives it to every rank, as `1263468544.0;tcp://10.78.0.1:34657` (orte's `hnp_uri`).
    """
    match = re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", ""))
    return match[1] if match else ""


LAUNCHERS = (
    Launcher(
        "torchrun",
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        ("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        binding_of=open_mpi_binding,
        master_of=open_mpi_master,
    ),
    Launcher(
        "MVAPICH",
        ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        "hydra (MPICH, Intel MPI)",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        binding_of=hydra_binding,
    ),
    Launcher(
        "srun",
        # sbatch sets SLURM_PROCID and a size too; only a step has an id that is a number.
        ("SLURM_PROCID", "SLURM_STEP_ID"),
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "",
        ("SLURM_JOB_ID",),
        slurm_tasks_here,
        srun_binding,
    ),
)


def detect_job(environ: Mapping[str, str]) -> Job:
    """Find the innermost launcher whose variables are all set; raises `UserError` where one is no number."""
    started_by = (row for row in LAUNCHERS if all(environ.get(name, "") != "" for name in row.present))
    row = next(started_by, None)
    job = read_rank(row, environ) if row else Job()
    nodes = slurm_nodes(environ)
    master = (row.master_of(environ) if row else "") or (nodes[0] if nodes else "")
    granted = {"granted_cpus": granted_cpus(environ), "node_cpus": job_cpus(environ)}
    parts = number(environ, "SLURM_HET_SIZE", 1)
    return replace(job, **granted, hostnames=nodes, master_addr=master, het_components=parts)  # type: ignore[arg-type]


def read_rank(row: Launcher, environ: Mapping[str, str]) -> Job:
    """Read one launcher's variables; raises `UserError` where they are no numbers or contradict each other."""
    rank = number(environ, row.rank, 0)
    world_size = number(environ, row.world_size, 1)
    local_rank = number(environ, row.local_rank, 0)
    local_size = row.local_size_of(environ) if row.local_size_of else number(environ, row.local_world_size, world_size)
    for what, value, size in ((row.rank, rank, world_size), (row.local_rank, local_rank, local_size)):
        if not 0 <= value < size:
            raise UserError(
                f"{what}={value}: {row.name} says that there are {size} ranks, so this must lie from 0 to"
                f" {size - 1}; unset what an outer launcher left behind"
            )
    job_id = next((environ[name] for name in row.job_id if environ.get(name)), "")
    return Job(row.name, rank, world_size, local_rank, local_size, job_id, row.binding_of(environ))
