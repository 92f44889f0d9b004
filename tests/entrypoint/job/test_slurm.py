"""What Slurm's variables say of this node, with environments dumped from Slurm 22.05."""

from __future__ import annotations

import pytest

from entrypoint.core.errors import UserError
from entrypoint.job.slurm import expand_per_node_count, granted_cpus, job_cpus, slurm_tasks_here

# sbatch -N1 -n2 -c1, the second task of its srun.
STEP = {
    "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "1", "SLURM_CPU_BIND": "quiet,mask_cpu:0x1,0x2",
    "SLURM_CPU_BIND_LIST": "0x1,0x2", "SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_JOB_CPUS_PER_NODE": "2",
    "SLURM_JOB_ID": "2", "SLURM_LOCALID": "1", "SLURM_NODEID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
    "SLURM_STEP_ID": "0", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2",
}  # fmt: skip
# sbatch -N1 -n1 -c2, the batch script itself.
BATCH = {
    "SLURM_CPUS_ON_NODE": "2", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_CPUS_PER_NODE": "2", "SLURM_JOB_ID": "1",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "1",
}  # fmt: skip


@pytest.mark.parametrize(("text", "node", "tasks"), [("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("4", 0, 4), ("1,3", 1, 3)])
def test_slurm_tasks_here_counts_this_node(text: str, node: int, tasks: int) -> None:
    assert slurm_tasks_here({"SLURM_STEP_TASKS_PER_NODE": text, "SLURM_NODEID": str(node)}) == tasks


def test_expand_per_node_count_large_counts_is_fast() -> None:
    assert expand_per_node_count("X", ",".join(["2(x999999)"] * 5000), 10**8) == 2


def test_job_cpus_malformed_list_raises() -> None:
    with pytest.raises(UserError, match=r"SLURM_JOB_CPUS_PER_NODE=2\(y3\): cannot be read; expected a form like"):
        job_cpus(BATCH | {"SLURM_JOB_CPUS_PER_NODE": "2(y3)"})


@pytest.mark.parametrize(
    ("environ", "granted", "of_job"),
    [
        ({}, None, None),
        ({"SLURM_CPUS_ON_NODE": "8"}, None, None),
        (BATCH, 2, 2),
        (STEP, 2, 2),
        (STEP | {"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_NODEID": "2"}, 2, 8),
    ],
)
def test_granted_cpus_outside_a_job_is_none(environ: dict[str, str], granted: int | None, of_job: int | None) -> None:
    assert (granted_cpus(environ), job_cpus(environ)) == (granted, of_job)
