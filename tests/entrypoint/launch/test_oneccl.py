"""oneCCL as a backend, by a package in its place: planned, tried, trained with, and ended when a rank is lost."""

from __future__ import annotations

import os
import shutil
import signal
import site
import subprocess
import sys
import time
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, clean_environment, needs_two_cores
from tests.processes import children, wait_until

pytestmark = [pytest.mark.launch, needs_two_cores]
STAND_IN = Path(__file__).parents[2] / "stand_ins/oneccl_bindings_for_pytorch"
CCL = {"LAUNCH_BACKEND": "ccl", "LAUNCH_NPROC_PER_NODE": "2", "TRAIN_TENSORBOARD": "0", "LAUNCH_QUIET": "1"}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an interpreter with all packages of this one, and the one in the place of oneCCL's bindings."""
    folder = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for source in site.getsitepackages():
        for entry in Path(source).iterdir():
            if not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    shutil.copytree(STAND_IN, packages / STAND_IN.name)
    return str(folder / "bin/python")


def test_ccl_trains_to_the_accuracy_of_gloo(entrypoint: Entrypoint, python: str, tmp_path: Path) -> None:
    command = (python, "-m", "entrypoint")
    env = CCL | {"TRAIN_EPOCHS": "3", "TRAIN_RUN_NAME": "ccl", "ONECCL_REPORT": str(tmp_path / "report")}
    entrypoint.succeed("train", env=env, command=command)
    gloo = entrypoint.train(env=CCL | {"TRAIN_EPOCHS": "3", "LAUNCH_BACKEND": "gloo", "TRAIN_RUN_NAME": "gloo"})
    ccl = entrypoint.summary("ccl")
    assert ccl["weights_sha256"] == gloo["weights_sha256"], "the stand-in sums as Gloo does"
    seen = dict(line.split("=", 1) for line in (tmp_path / "report.1").read_text().splitlines())
    assert seen["CCL_ATL_TRANSPORT"] == "ofi"
    assert (seen["CCL_WORKER_OFFLOAD"], seen["CCL_YIELD"]) == ("0", "sched_yield")
    assert seen["FI_PROVIDER_PATH"] == f"{seen['I_MPI_ROOT']}/opt/mpi/libfabric/lib/prov"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["I_MPI_ROOT", "FI_PROVIDER_PATH"])
def test_ccl_without_its_transport_is_refused_by_the_plan(entrypoint: Entrypoint, python: str, name: str) -> None:
    command = (python, "-m", "entrypoint")
    assert (
        "LAUNCH_BACKEND=ccl: cannot be used (RuntimeError: oneCCL: could not initialize any transport"
        in entrypoint.error_line("plan", env=CCL | {name: "/nowhere"}, command=command, code=ExitCode.MACHINE)
    )
    doctor = entrypoint("doctor", env={name: "/nowhere"}, command=command).out
    assert "could not initialize any transport" in doctor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "limit_s"), [(signal.SIGKILL, 30), pytest.param(signal.SIGSTOP, 45, marks=pytest.mark.slow)]
)
def test_lost_rank_ends_a_job_over_ccl(
    entrypoint: Entrypoint, python: str, number: signal.Signals, limit_s: float
) -> None:
    env = CCL | {"TRAIN_EPOCHS": "100000", "LAUNCH_COLLECTIVE_TIMEOUT_S": "8", "HOME": str(entrypoint.home)}
    log = entrypoint.folder / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            (python, "-m", "entrypoint", "train"),
            cwd=entrypoint.folder,
            env={**clean_environment(), **env},
            stdout=out,
            stderr=out,
        )
    try:
        wait_until(lambda: "epoch 2/" in log.read_text())
        os.kill(children(process.pid)[-1], number)
        began = time.monotonic()
        assert process.wait(limit_s) == ExitCode.RANK_FAILED, log.read_text()
        assert time.monotonic() - began < limit_s
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()
