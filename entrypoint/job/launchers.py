"""The launchers that this project knows, one row each: which variables give a process its rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

from msgspec import Struct

from entrypoint.job.slurm import number, slurm_step, slurm_tasks_here, tasks_by_totals


class LauncherBinding(Enum):
    """What bound this rank to CPUs before the plan: nothing, the user or scheduler, or the launcher's default."""

    NONE = "none"
    USER = "user"
    LAUNCHER_DEFAULT = "launcher default"


class Family(Enum):
    """Launchers that are treated alike: `BATCH_ID` has the batch job's id, in which there may be several runs."""

    OPEN_MPI = "Open MPI"
    HYDRA = "hydra"
    BATCH_ID = "batch id"
    OTHER = "other"


class Launcher(Struct, frozen=True):
    """A row: concept → variable. If all of `present` are set and `absent` is not, this launcher started the process.

    `local_world_size` lists the variables that may hold the number of ranks on this node. `local_size_of` computes
    that number where no variable has it, None if it cannot.
    `job_id` lists the variables that may hold an id of the run, `job_id_of` computes it.
    """

    name: str
    present: tuple[str, ...]
    rank: str
    world_size: str
    local_rank: str
    local_world_size: tuple[str, ...] = ()
    job_id: tuple[str, ...] = ()
    job_id_of: Callable[[Mapping[str, str]], str] = lambda _: ""
    local_size_of: Callable[[Mapping[str, str]], int | None] = lambda _: None
    binding_of: Callable[[Mapping[str, str]], LauncherBinding] = lambda _: LauncherBinding.NONE
    master_of: Callable[[Mapping[str, str]], str] = lambda _: ""
    absent: str = ""
    family: Family = Family.OTHER


# What mpirun's options and MCA parameters leave in a rank's environment (Open MPI 4: OMPI_MCA_, PRRTE: PRTE_MCA_).
BINDING_POLICY_VARS = ("OMPI_MCA_hwloc_base_binding_policy", "PRTE_MCA_hwloc_default_binding_policy")
MAPPING_POLICY_VARS = ("OMPI_MCA_rmaps_base_mapping_policy", "PRTE_MCA_rmaps_default_mapping_policy")
CPU_LIST_VARS = (
    "OMPI_MCA_hwloc_base_cpu_set",
    "OMPI_MCA_hwloc_base_cpu_list",
    "PRTE_MCA_hwloc_default_cpu_list",
    "OMPI_MCA_orte_rankfile",
    "OMPI_MCA_rmaps_rank_file_path",
    "PRTE_MCA_rmaps_file",
)


def open_mpi_binding(environ: Mapping[str, str]) -> LauncherBinding:
    """Return what bound a rank of Open MPI.

    By default Open MPI binds to a core up to two ranks, to a socket above (mpirun(1)). Open MPI 5 leaves nothing of
    its options in the environment, so `effective_affinity` also reads mpirun's command line.
    """
    policies = [environ[name] for name in BINDING_POLICY_VARS if environ.get(name)]
    mappings = [environ[name] for name in MAPPING_POLICY_VARS if environ.get(name)]
    lists = [environ[name] for name in CPU_LIST_VARS if environ.get(name)]
    asked = requested_binding(policies, mappings, lists)
    return LauncherBinding.LAUNCHER_DEFAULT if asked is None else asked


def requested_binding(policies: list[str], mappings: list[str], cpu_lists: list[str]) -> LauncherBinding | None:
    """Return whether the user's options bind ranks, None if they say nothing about it.

    `--map-by` binds only with PE=N or PE-LIST=… (mpirun(1)).
    """
    if cpu_lists or any(re.search(r"\bPE(-LIST)?=", text, re.IGNORECASE) for text in mappings):
        return LauncherBinding.USER
    if policies:
        return LauncherBinding.NONE if policies[-1].lower().startswith("none") else LauncherBinding.USER
    return None


def mpirun_binding(words: Sequence[str]) -> LauncherBinding | None:
    """Return what the options of an Open MPI command line ask for, as `requested_binding` does.

    `words` are those before the program, whose own options may have the same names.
    """
    values: dict[str, list[str]] = {"bind": [], "map": [], "list": []}
    for word, value in zip(words, (*words[1:], ""), strict=True):
        name, _, attached = word.lstrip("-").lower().partition("=")
        kind = MPIRUN_OPTIONS.get(name) if word.startswith("-") else MCA_PARAMETERS.get(name)
        if kind:
            values[kind].append(attached or value)
        elif word.startswith("-") and re.fullmatch(r"bind-to-(core|socket|none)", name):
            values["bind"].append(name.removeprefix("bind-to-"))
    return requested_binding(values["bind"], values["map"], values["list"])


MPIRUN_OPTIONS = {
    **dict.fromkeys(("bind-to",), "bind"),
    **dict.fromkeys(("map-by",), "map"),
    **dict.fromkeys(("cpu-set", "cpu-list", "rf", "rankfile", "slot-list", "cpus-per-proc", "cpus-per-rank"), "list"),
}
# After `--mca` or `--prtemca`, each followed by its value.
MCA_PARAMETERS = {
    **dict.fromkeys((name.partition("_MCA_")[2] for name in BINDING_POLICY_VARS), "bind"),
    **dict.fromkeys((name.partition("_MCA_")[2] for name in MAPPING_POLICY_VARS), "map"),
    **dict.fromkeys((name.partition("_MCA_")[2] for name in CPU_LIST_VARS), "list"),
}


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
    """Return the address or name of mpirun's own node, which has rank 0 unless a user's list of hosts says otherwise.

    Open MPI 4 gives every rank the address, as `1263468544.0;tcp://10.78.0.1:34657` (orte's `hnp_uri`). Open MPI 5
    gives the name, in the namespace `prterun-node1-17@1`; its PMIX_SERVER_URI* are each node's own. A batch job knows
    its first node better, because mpirun may have been started elsewhere.
    """
    if match := re.search(r";tcp://([0-9.]+)", environ.get("OMPI_MCA_orte_hnp_uri", "")):
        return match[1]
    match = re.fullmatch(r"prte(?:run)?-(.+)-\d+@\d+", environ.get("PMIX_NAMESPACE", ""))
    return match[1] if match and not environ.get("SLURM_JOB_NODELIST") else ""


# The innermost launcher wins: torchrun inside srun sees both, and `mpirun` inside sbatch leaves SLURM_PROCID=0 in
# every rank. Cray's PMI is last, because srun sets its variables too.
LAUNCHERS = (
    Launcher(
        name="torchrun",
        present=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),  # the second is DeepSpeed's
        job_id=("TORCHELASTIC_RUN_ID",),
    ),
    Launcher(
        name="Open MPI",
        present=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        binding_of=open_mpi_binding,
        family=Family.OPEN_MPI,
        master_of=open_mpi_master,
    ),
    Launcher(
        name="MVAPICH",
        present=("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        rank="MV2_COMM_WORLD_RANK",
        world_size="MV2_COMM_WORLD_SIZE",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_world_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Launcher(
        name="jsrun",  # IBM Job Step Manager; it binds each task to its resource set
        present=("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
        rank="JSM_NAMESPACE_RANK",
        world_size="JSM_NAMESPACE_SIZE",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_world_size=("JSM_NAMESPACE_LOCAL_SIZE",),
        job_id=("LSB_JOBID",),
        binding_of=lambda _: LauncherBinding.USER,
        family=Family.BATCH_ID,
    ),
    Launcher(
        name="PALS",  # HPE Cray's mpiexec; `--cpu-bind` sets each task's mask
        present=("PALS_RANKID", "PMI_SIZE"),
        rank="PALS_RANKID",
        world_size="PMI_SIZE",
        local_rank="PALS_LOCAL_RANKID",
        local_world_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
        job_id=("PALS_APID", "PBS_JOBID"),
        binding_of=lambda _: LauncherBinding.USER,
        absent="SLURM_STEP_ID",  # srun --mpi=cray_shasta sets them too
    ),
    Launcher(
        name="Flux",
        present=("FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
        rank="FLUX_TASK_RANK",
        world_size="FLUX_JOB_SIZE",
        local_rank="FLUX_TASK_LOCAL_ID",
        job_id=("FLUX_JOB_ID",),
        # Only the totals are known (flux-environment(7)).
        local_size_of=lambda environ: tasks_by_totals(
            number(environ, "FLUX_JOB_SIZE", 1), number(environ, "FLUX_JOB_NNODES", 0)
        ),
    ),
    Launcher(
        name="hydra (MPICH, Intel MPI)",
        present=("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size=("MPI_LOCALNRANKS",),
        binding_of=hydra_binding,
        family=Family.HYDRA,
    ),
    Launcher(
        name="srun",
        # sbatch sets SLURM_PROCID and a size too; only a step has an id that is a number.
        present=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank="SLURM_PROCID",
        world_size="SLURM_NTASKS",
        local_rank="SLURM_LOCALID",
        job_id_of=slurm_step,
        local_size_of=slurm_tasks_here,
        binding_of=srun_binding,
    ),
    Launcher(
        name="PMI",  # Cray MPICH and others that set the local rank by this name
        present=("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK"),
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="PMI_LOCAL_RANK",
        local_world_size=("PMI_LOCAL_SIZE",),
        job_id=("PBS_JOBID",),
        binding_of=lambda _: LauncherBinding.USER,
        family=Family.BATCH_ID,
    ),
)
