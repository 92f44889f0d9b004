"""Who started this process, from the variables that each launcher sets."""

from __future__ import annotations

import pytest

from entrypoint.core.errors import UserError
from entrypoint.job.detect import Job, LauncherBinding, detect_job

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "77",
}  # fmt: skip
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
BATCH = {"SLURM_JOB_ID": "42", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0"}
STEP = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_NTASKS": "7", "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}  # fmt: skip

CASES = {
    "nobody": ({}, Job()),
    "torchrun": (TORCHRUN, Job("torchrun", 3, 4, 1, 2, "x")),
    "Open MPI": (OPEN_MPI, Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT)),
    "hydra": (HYDRA, Job("hydra (MPICH, Intel MPI)", 2, 4, 0, 2)),
    "srun": (STEP, Job("srun", 5, 7, 1, 2, "42")),
    "a batch script without srun is started by nobody": (BATCH, Job()),
    "torchrun inside srun": (STEP | TORCHRUN, Job("torchrun", 3, 4, 1, 2, "x")),
    "mpirun inside sbatch": (BATCH | OPEN_MPI, Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT)),
    "hydra inside sbatch": (BATCH | HYDRA, Job("hydra (MPICH, Intel MPI)", 2, 4, 0, 2)),
    "a size alone proves nothing": ({"WORLD_SIZE": "4"}, Job()),
}


@pytest.mark.parametrize("name", CASES)
def test_detect_job_finds_innermost_launcher(name: str) -> None:
    environ, job = CASES[name]
    assert detect_job(environ) == job


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (TORCHRUN | {"RANK": "four"}, "RANK=four: not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4: torchrun says that there are 4 ranks"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two"),
    ],
)
def test_detect_job_invalid_variable_raises(environ: dict[str, str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        detect_job(environ)


@pytest.mark.parametrize(
    ("environ", "binding"),
    [
        (OPEN_MPI, LauncherBinding.LAUNCHER_DEFAULT),
        (OPEN_MPI | {"OMPI_MCA_hwloc_base_binding_policy": "none"}, LauncherBinding.NONE),
        (OPEN_MPI | {"OMPI_MCA_hwloc_base_binding_policy": "core"}, LauncherBinding.USER),
        (HYDRA, LauncherBinding.NONE),
        (HYDRA | {"HYDRA_USER_PROVIDED_BINDING": "1"}, LauncherBinding.USER),
        (HYDRA | {"I_MPI_MPIRUN": "mpirun"}, LauncherBinding.LAUNCHER_DEFAULT),
        (HYDRA | {"I_MPI_MPIRUN": "mpirun", "I_MPI_PIN": "off"}, LauncherBinding.NONE),
        (HYDRA | {"I_MPI_PIN_DOMAIN": "omp"}, LauncherBinding.USER),
        (STEP | {"SLURM_CPU_BIND_TYPE": "mask_cpu:"}, LauncherBinding.USER),
        (STEP | {"SLURM_CPU_BIND_TYPE": "none"}, LauncherBinding.NONE),
        (TORCHRUN, LauncherBinding.NONE),
    ],
)
def test_detect_job_distinguishes_user_and_default_binding(environ: dict[str, str], binding: LauncherBinding) -> None:
    assert detect_job(environ).cpu_binding == binding
