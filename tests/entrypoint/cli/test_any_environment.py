"""Any environment at all ends in a plan or in our own refusal: FUZZ_EXAMPLES says how many are tried."""

from __future__ import annotations

import io
import os
import sys
import time

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from entrypoint.cli.main import run_command
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.settings_base import groups_of
from entrypoint.job.launchers import LAUNCHERS
from entrypoint.plan.environment import USER_OVERRIDABLE
from entrypoint.settings import LaunchSettings
from tests.conftest import FUZZ_EXAMPLES
from train.settings import TrainSettings

OURS = [
    prefix + field.upper()
    for prefix, model in (("LAUNCH_", LaunchSettings), ("TRAIN_", TrainSettings))
    for field in groups_of(model)
]
LAUNCHERS_OWN = [
    name
    for row in LAUNCHERS
    for name in (*row.present, row.rank, row.world_size, row.local_rank, *row.local_world_size, *row.job_id)
    if name
]
SLURMS = ["SLURM_JOB_ID", "SLURM_CPUS_ON_NODE", "SLURM_JOB_CPUS_PER_NODE", "SLURM_CPU_BIND_TYPE", "SLURM_NODEID"]
MPIS = ["OMPI_MCA_hwloc_base_binding_policy", "HYDRA_USER_PROVIDED_BINDING", "I_MPI_PIN", "I_MPI_PIN_DOMAIN"]
OTHERS = [
    *USER_OVERRIDABLE,
    *SLURMS,
    *MPIS,
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_TASKS_PER_NODE",
]
MISSPELT = st.builds(str.__add__, st.sampled_from(["LAUNCH_", "TRAIN_", "launch_"]), st.text("ABCXYZ_", max_size=12))
LIKELY = ["", "0", "1", "2", "-1", "auto", "cpu", "cuda", "gnu", "intel", "1.5", "nan", "2(x3),1", "imagefolder"]

# What the kernel can hand to a process: any bytes but NUL, undecodable ones as surrogates (PEP 383).
anything = st.binary(max_size=60).map(lambda raw: os.fsdecode(raw.replace(b"\0", b"")))
values = st.sampled_from(LIKELY) | st.integers().map(str) | anything | st.just("x" * 70_000)
environments = st.dictionaries(st.sampled_from([*OURS, *LAUNCHERS_OWN, *OTHERS]) | MISSPELT, values, max_size=8)
commands = st.sampled_from([["plan"], ["plan", "--json"], ["train", "--dry-run"], ["plan", "run", "-m", "x"]])


@pytest.mark.generated
@settings(max_examples=FUZZ_EXAMPLES, suppress_health_check=[HealthCheck.too_slow])
@given(commands, environments)
def test_any_environment_gives_plan_or_one_line_errors(command: list[str], environ: dict[str, str]) -> None:
    out, kept = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), sys.stdout
    started_s = time.process_time()
    sys.stdout = out
    try:
        assert run_command(command, environ) == 0
    except UserError as error:
        assert error.code in (ExitCode.USAGE, ExitCode.MACHINE, ExitCode.RENDEZVOUS)
        assert all(line.isprintable() and line for line in str(error).split("\n"))
        assert len(str(error)) < 4000
    finally:
        sys.stdout = kept
    assert time.process_time() - started_s < 1
