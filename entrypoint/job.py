"""Who started this process, and where it stands in the job: one table, one row a launcher.

The innermost launcher wins, so the rows stand in the order torchrun, Open MPI, MVAPICH, hydra, Slurm:
torchrun inside srun sees both, and `mpirun` inside sbatch leaves SLURM_PROCID=0 in every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from entrypoint.errors import Refused, shown


@dataclass(frozen=True)
class Job:
    """This process's place: no launcher means that a person (or a batch script) started it alone."""

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    id: str = ""

    @property
    def on_one_node(self) -> bool:
        """Tell whether every rank of the job is on this node."""
        return self.local_world_size == self.world_size


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


def slurm_tasks_here(environ: Mapping[str, str]) -> int:
    """Return the tasks of this step on this node, from `2(x3),1` and the node's index.

    The form is that of srun(1), SLURM_TASKS_PER_NODE. Raises `Refused` for another.
    """
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "1")
    counts: list[int] = []
    for group in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", group)
        if not match:
            raise Refused(f"SLURM_TASKS_PER_NODE={shown(text)}: cannot be read; expected a form like 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    node = int(environ.get("SLURM_NODEID", "0"))
    return counts[min(node, len(counts) - 1)]


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
    ),
)


def read_job(environ: Mapping[str, str]) -> Job:
    """Find the innermost launcher whose variables are all set; raises `Refused` where one is no number."""
    for row in LAUNCHERS:
        if all(environ.get(name, "") != "" for name in row.present):
            return place(row, environ)
    return Job()


def place(row: Launcher, environ: Mapping[str, str]) -> Job:
    """Read one launcher's variables; raises `Refused` where they are no numbers or contradict each other."""
    rank = number(environ, row.rank, 0)
    world_size = number(environ, row.world_size, 1)
    local_rank = number(environ, row.local_rank, 0)
    local_size = row.local_size_of(environ) if row.local_size_of else number(environ, row.local_world_size, world_size)
    for what, value, size in ((row.rank, rank, world_size), (row.local_rank, local_rank, local_size)):
        if not 0 <= value < size:
            raise Refused(
                f"{what}={value}: {row.name} says that there are {size} ranks, so this must lie from 0 to"
                f" {size - 1}; unset what an outer launcher left behind"
            )
    job_id = next((environ[name] for name in row.job_id if environ.get(name)), "")
    return Job(row.name, rank, world_size, local_rank, local_size, job_id)


def number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return a variable as a whole number; raises `Refused` naming it where it is none."""
    text = environ.get(name) or str(default)
    if not re.fullmatch(r"-?\d{1,9}", text, re.ASCII):
        raise Refused(f"{name}={shown(text)}: not a whole number; a launcher sets it, so unset it if you did")
    return int(text)
