"""Who started this process, from the variables that each launcher sets."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job, detect_job
from entrypoint.job.launchers import LauncherBinding
from tests.conftest import refusal

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

PALS = {
    "PMI_RANK": "1", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2", "PALS_RANKID": "1",
    "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "2", "PALS_NODEID": "0", "PALS_APID": "ab",
}  # fmt: skip
FLUX = {
    "FLUX_TASK_RANK": "1", "FLUX_TASK_LOCAL_ID": "1", "FLUX_JOB_SIZE": "2", "FLUX_JOB_NNODES": "1", "PMI_RANK": "1",
    "PMI_SIZE": "2",
}  # fmt: skip
JSM = {
    "JSM_NAMESPACE_RANK": "3", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_LOCAL_RANK": "1",
    "JSM_NAMESPACE_LOCAL_SIZE": "2", "PMIX_RANK": "3",
}  # fmt: skip
WRAPPED = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0",
    "MASTER_ADDR": "node1",
}  # fmt: skip
# The shell of `salloc -n2`, as a Slurm 22.05 with LaunchParameters=use_interactive_step sets it.
SALLOC = {
    "SLURM_JOB_ID": "4", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "n1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NODEID": "0",
}  # fmt: skip
PTY = STEP | {"SLURM_PTY_PORT": "41234", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
SINGLE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
PMI_SHELL = {"PMI_RANK": "0", "PMI_SIZE": "7", "PMIX_RANK": "0"}

CASES = {
    "nobody": ({}, Job()),
    "torchrun": (TORCHRUN, Job("torchrun", 3, 4, 1, 2, "x")),
    "Open MPI": (OPEN_MPI, Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT)),
    "hydra": (HYDRA, Job("hydra (MPICH, Intel MPI)", 2, 4, 0, 2)),
    "srun": (STEP, Job("srun", 5, 7, 1, 2, "42.0")),
    "a batch script without srun is started by nobody": (BATCH, Job()),
    "torchrun inside srun": (STEP | TORCHRUN, Job("torchrun", 3, 4, 1, 2, "x")),
    "mpirun inside sbatch": (BATCH | OPEN_MPI, Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT)),
    "hydra inside sbatch": (BATCH | HYDRA, Job("hydra (MPICH, Intel MPI)", 2, 4, 0, 2)),
    "a size alone proves nothing": ({"WORLD_SIZE": "4"}, Job()),
    "PALS": (PALS, Job("PALS", 1, 4, 1, 2, "ab", LauncherBinding.USER)),
    "Flux on one node": (FLUX, Job("Flux", 1, 2, 1, 2)),
    "Flux, a task per node": (
        FLUX | {"FLUX_JOB_NNODES": "2", "FLUX_TASK_LOCAL_ID": "0"},
        Job("Flux", 1, 2, 0, 1),
    ),
    "Flux with the answer": (
        FLUX | {"FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2", "LOCAL_WORLD_SIZE": "2"},
        Job("Flux", 1, 4, 1, 2),
    ),
    "jsrun": (JSM, Job("jsrun", 3, 4, 1, 2, "", LauncherBinding.USER)),
    "jsrun with Open MPI's variables": (
        JSM | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
        Job("Open MPI", 3, 4, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT),
    ),
    "Cray MPICH": (
        {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
        Job("PMI", 3, 4, 1, 2, "", LauncherBinding.USER),
    ),
    "Cray MPICH under srun": (
        STEP | {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_LOCAL_RANK": "1"},
        Job("srun", 5, 7, 1, 2, "42.0"),
    ),
    "a wrapper that copies srun's numbers": (WRAPPED, Job("srun", 1, 2, 0, 1, "7.0")),
    "a wrapper that copies Open MPI's numbers": (
        OPEN_MPI | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT),
    ),
    "a wrapper that copies PALS's numbers": (
        PALS | {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"},
        Job("PALS", 1, 4, 1, 2, "ab", LauncherBinding.USER),
    ),
    "a wrapper that also counts the ranks here": (
        WRAPPED | {"LOCAL_WORLD_SIZE": "1"},
        Job("torchrun", 1, 2, 0, 1),
    ),
    "ranks at a loopback address": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1"},
        Job("torchrun", 1, 2, 1, 2),
    ),
    "a single rank without its local size": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, Job("torchrun")),
    "torchrun alone in each task of a step": (
        STEP | SINGLE | {"LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
        Job("torchrun", job_id="x"),
    ),
    "a launcher in each task of a step, one a node": (
        WRAPPED | {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_SIZE": "2"},
        Job("torchrun", 2, 4, 0, 2),
    ),
    "mpirun's daemons as tasks of a step": (
        WRAPPED | OPEN_MPI | {"RANK": "", "SLURM_PROCID": "0"},
        Job("Open MPI", 1, 2, 1, 2, "77", LauncherBinding.LAUNCHER_DEFAULT),
    ),
    "a single rank in a step of one task with PMIx": (
        STEP
        | SINGLE
        | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "PMIX_RANK": "0"}
        | {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"},
        Job("srun", job_id="42.0"),
    ),
    "a single rank in the shell of srun --pty": (PTY | SINGLE | PMI_SHELL, Job("torchrun")),
    "the shell of srun --pty with PMI": (PTY | PMI_SHELL, Job()),
    "DeepSpeed": (
        {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"},
        Job("torchrun", 5, 8, 1, 4),
    ),
    "the shell of salloc": (SALLOC, Job()),
    "the shell of srun --pty": (PTY, Job()),
    "a step whose job has more tasks": (
        STEP | {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "7"},
        Job("srun", 5, 7, 1, 2, "42.0"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_detect_job_finds_innermost_launcher(name: str) -> None:
    environ, job = CASES[name]
    assert replace(detect_job(environ), hostnames=(), master_addr="") == job


def test_salloc_shell_has_the_nodes_of_the_job() -> None:
    assert detect_job(SALLOC).hostnames == ("n1", "n2")


def test_srun_pty_of_a_program_is_a_rank() -> None:
    assert detect_job(PTY, "slurmstepd").launcher == "srun"


def test_srun_pty_second_task_is_refused() -> None:
    refusal(detect_job, PTY | {"SLURM_PROCID": "1"}, "bash", match="SLURM_PROCID=1: srun --pty started this process")


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (TORCHRUN | {"RANK": "four"}, "RANK=four: not a whole number"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4: torchrun says that there are 4 ranks"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "WORLD_SIZE=4: 5 ranks are on this node alone; unset what"),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two"),
        (
            {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
            "WORLD_SIZE=8: the launcher does not say .* LOCAL_WORLD_SIZE",
        ),
        (WRAPPED | {"RANK": "0"}, "RANK=0 and WORLD_SIZE=2: srun started this process as rank 1 of 2"),
        (
            WRAPPED | {"RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "RANK=0 and WORLD_SIZE=2: srun started this process as rank 1 of 2",
        ),
        (WRAPPED | SINGLE, "RANK=0 and WORLD_SIZE=1: srun started this process as rank 1 of 2"),
        (OPEN_MPI | SINGLE, "RANK=0 and WORLD_SIZE=1: Open MPI started this process as rank 1 of 2. Unset RANK"),
        (
            OPEN_MPI | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
            "RANK=0 and WORLD_SIZE=4: Open MPI started this process as rank 1 of 2",
        ),
        (
            STEP | OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
            "OMPI_COMM_WORLD_RANK=0 and OMPI_COMM_WORLD_SIZE=1: srun started this process as rank 5 of 7",
        ),
        (SINGLE | {"PMI_RANK": "1", "PMI_SIZE": "2"}, "RANK=0 and WORLD_SIZE=1: PMI_SIZE=2 says that there are other"),
        (SINGLE | {"PMIX_RANK": "0"}, "RANK=0 and WORLD_SIZE=1: PMIX_RANK=0 says"),
        (SINGLE | {"PET_NNODES": "2"}, "RANK=0 and WORLD_SIZE=1: PET_NNODES=2 says"),
        (PALS | {"PALS_LOCAL_RANKID": ""}, "PALS_LOCAL_RANKID is not set: 2 of the 4 ranks are on this node"),
        (
            OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_RANK": ""},
            "OMPI_COMM_WORLD_LOCAL_RANK is not set: 2 of the 2 ranks are on this node",
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            "Set LOCAL_WORLD_SIZE to that number, and OMPI_COMM_WORLD_LOCAL_RANK to this rank's number among them",
        ),
        (STEP | {"SLURM_LOCALID": ""}, "SLURM_LOCALID is not set"),
        (
            {"PALS_RANKID": "0", "PMI_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            "PALS_LOCAL_RANKID is not set: .* Set PALS_LOCAL_RANKID to this rank's number on its node, from 0 to 1.",
        ),
        (FLUX | {"FLUX_JOB_SIZE": "4", "FLUX_JOB_NNODES": "2"}, "FLUX_JOB_SIZE=4: Flux does not say how many"),
        (PALS | {"PALS_LOCAL_RANKID": "2"}, "PALS_LOCAL_RANKID=2: PALS says that there are 2 ranks"),
        (JSM | {"JSM_NAMESPACE_LOCAL_SIZE": ""}, "JSM_NAMESPACE_SIZE=4: jsrun does not say"),
    ],
)
def test_detect_job_invalid_variable_raises(environ: dict[str, str], said: str) -> None:
    refusal(detect_job, environ, match=said)


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
