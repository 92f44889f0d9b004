"""Detect the launcher of this process and its rank in the job, by the table in `launchers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.errors import UserError, refuse_if
from entrypoint.core.network import is_loopback_name
from entrypoint.job.launchers import LAUNCHERS, Family, Launcher, LauncherBinding
from entrypoint.job.slurm import granted_cpus, is_interactive_step, job_cpus, number, slurm_nodes, without_step
from entrypoint.job.unclaimed import unclaimed_rank_variables, without_batch_exports

if TYPE_CHECKING:
    from entrypoint.settings import LaunchSettings


class Job(Struct, frozen=True):
    """The rank identity of this process; without a launcher, the user or a batch script started a single process.

    `granted_cpus` are the CPUs that the scheduler grants the ranks of this node. `node_cpus` are those that it grants
    the whole job there. `master_addr` is rank 0's host if the launcher sets it. `hostnames` are the job's nodes in
    order. Of a heterogeneous job's `het_components`, a batch script sees only the nodes of the first. `scheduler` is
    the name of what grants CPUs and nodes. `hidden_hosts` names its file of hosts where that cannot be read here.
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
    scheduler: str = "Slurm"
    hidden_hosts: str = ""

    @property
    def family(self) -> Family:
        """Return which launchers this job's is treated like."""
        return next((row.family for row in LAUNCHERS if row.name == self.launcher), Family.OTHER)

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


def detect_job(environ: Mapping[str, str], parent: str = "") -> Job:
    """Find the innermost launcher whose variables are all set; `parent` is the name of the parent process.

    Raises `UserError` where a variable is no number, where two launchers contradict each other, or where the number
    of ranks on this node is unknown.
    """
    given = environ
    if is_interactive_step(environ, parent):
        environ = without_step(environ)
    elif environ.get("SLURM_STEP_NUM_TASKS"):  # SLURM_NTASKS may be the size of the whole job
        environ = {**environ, "SLURM_NTASKS": environ["SLURM_STEP_NUM_TASKS"]}
    rows = [row for row in LAUNCHERS if all(environ.get(name) for name in row.present) and not environ.get(row.absent)]
    row = innermost(rows, environ)
    if row:
        check_outer_launchers(row, rows, environ)
        check_single_rank(row, rows, given)
    job = read_rank(row, environ) if row else Job()
    nodes = slurm_nodes(environ)
    master = (row.master_of(environ) if row else "") or (nodes[0] if nodes else "")
    granted = {"granted_cpus": granted_cpus(environ), "node_cpus": job_cpus(environ)}
    parts = number(environ, "SLURM_HET_SIZE", 1)
    return replace(job, **granted, hostnames=nodes, master_addr=master, het_components=parts)


def innermost(rows: list[Launcher], environ: Mapping[str, str]) -> Launcher | None:
    """Return the first row; of a wrapper's incomplete copy, the row that it was copied from.

    A batch script or a container's hook may export RANK, WORLD_SIZE and LOCAL_RANK with the launcher's own numbers,
    and without LOCAL_WORLD_SIZE (enroot's hook 50-slurm-pytorch.sh). The launcher's own row knows the rest.
    """
    for row in rows:
        if local_size(row, environ) is not None:
            return row
        numbers = row_numbers(row, environ)
        original = next((other for other in rows if other is not row and row_numbers(other, environ) == numbers), None)
        return original or row
    return None


def check_outer_launchers(row: Launcher, rows: list[Launcher], environ: Mapping[str, str]) -> None:
    """Raise `UserError` where another launcher started more ranks than the detected row knows of.

    A batch script or a shell's profile may export RANK=0 and WORLD_SIZE=1: each process would then train alone. A
    launcher inside a task of another one starts at least as many ranks as there are tasks. An agent of torchrun that
    shares a node with others is started by the user, for a job of its own.
    """
    if environ.get("TORCHELASTIC_RUN_ID"):
        return
    rank, world_size, _ = row_numbers(row, environ)
    for other in rows:
        outer_rank, outer_size, _ = row_numbers(other, environ)
        if outer_size == 1 or (rank, world_size) == (outer_rank, outer_size):
            continue
        if row.name != "torchrun" and world_size >= outer_size:  # an MPI's daemons are tasks of a step
            continue
        if world_size > outer_size and local_size(other, environ) in (1, None):
            continue
        raise UserError(
            f"{row.rank}={rank} and {row.world_size}={world_size}: {other.name} started this process as rank"
            f" {outer_rank} of {outer_size}. Unset {row.rank} and {row.world_size} if a script left them behind."
        )


def check_single_rank(row: Launcher, rows: list[Launcher], environ: Mapping[str, str]) -> None:
    """Raise `UserError` where WORLD_SIZE=1 is all that claims this process, and another variable says otherwise."""
    rank, world_size, _ = row_numbers(row, environ)
    if environ.get("TORCHELASTIC_RUN_ID") or len(rows) > 1 or row.name != "torchrun" or world_size > 1:
        return
    others = {name: value for name, value in environ.items() if name not in row.present}
    found = next(unclaimed_rank_variables(without_batch_exports(others, 1)), "")
    if found:
        raise UserError(
            f"{row.rank}={rank} and {row.world_size}={world_size}: {found} says that there are other ranks. Unset"
            f" {row.rank} and {row.world_size} if a script left them behind."
        )


def row_numbers(row: Launcher, environ: Mapping[str, str]) -> tuple[int, int, int]:
    """Return rank, world size and local rank by one launcher's variables."""
    return number(environ, row.rank, 0), number(environ, row.world_size, 1), number(environ, row.local_rank, 0)


def local_size(row: Launcher, environ: Mapping[str, str]) -> int | None:
    """Return the number of ranks on this node by one launcher's variables, None if they do not tell."""
    name = next((name for name in row.local_world_size if environ.get(name)), None)
    return number(environ, name, 1) if name else row.local_size_of(environ)


def read_rank(row: Launcher, environ: Mapping[str, str]) -> Job:
    """Read one launcher's variables; raises `UserError` where they are no numbers or contradict each other."""
    rank, world_size, local_rank = row_numbers(row, environ)
    here = local_size(row, environ)
    if here is None:
        here = assumed_local_size(row, environ, world_size)
    refuse_if(
        {
            f"{what}={value}: {name_of(row, environ)} says that there are {size} ranks, so this must lie from 0 to"
            f" {size - 1}; unset what an outer launcher left behind": not 0 <= value < size
            for what, value, size in ((row.rank, rank, world_size), (row.local_rank, local_rank, here))
        }
        | {
            f"{row.world_size}={world_size}: {here} ranks are on this node alone; unset what an outer launcher left"
            " behind": here > world_size,
            f"{row.local_rank} is not set: {here} of the {world_size} ranks are on this node, and each needs its own"
            f" cores. Set {row.local_rank} to this rank's number on its node, from 0 to {here - 1}.": (
                here > 1 and not environ.get(row.local_rank)
            ),
        }
    )
    job_id = next((environ[name] for name in row.job_id if environ.get(name)), "") or row.job_id_of(environ)
    return Job(
        launcher=row.name,
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=here,
        job_id=job_id,
        cpu_binding=row.binding_of(environ),
    )


def assumed_local_size(row: Launcher, environ: Mapping[str, str], world_size: int) -> int:
    """Return the number of ranks on this node where the launcher does not say it.

    Raises `UserError` unless LOCAL_WORLD_SIZE is set, the world has one rank, or rank 0 is at a loopback address.
    """
    if environ.get("LOCAL_WORLD_SIZE"):
        return number(environ, "LOCAL_WORLD_SIZE", 1)
    if world_size == 1 or is_loopback_name(environ.get("MASTER_ADDR", "")):
        return world_size
    missing = "" if environ.get(row.local_rank) else f", and {row.local_rank} to this rank's number among them, from 0"
    raise UserError(
        f"{row.world_size}={world_size}: {name_of(row, environ)} does not say how many of these ranks are on this"
        f" node. Set LOCAL_WORLD_SIZE to that number{missing}."
    )


def name_of(row: Launcher, environ: Mapping[str, str]) -> str:
    """Return a launcher's name for a message; DeepSpeed and platforms set torchrun's variables too."""
    return "the launcher" if row.name == "torchrun" and not environ.get("TORCHELASTIC_RUN_ID") else row.name
