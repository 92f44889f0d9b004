"""What a person submits, as it stands in cluster/: trains, saves before the end, is requeued and goes on."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster, Slurm
from tests.conftest import script
from tests.containers.conftest import REPOSITORY

pytestmark = pytest.mark.cluster

FILES = REPOSITORY / "cluster"
SHORT = {"IMAGE": "", "TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "job"}
LONG = {"IMAGE": "", "TRAIN_EPOCHS": "100000", "TRAIN_RUN_NAME": "job", "TRAIN_CHECKPOINT_EVERY": "50"}


@pytest.fixture
def installed(cluster: Cluster) -> dict[str, str]:
    """A PATH with the entrypoint's command, as a shared installation has it, and with Open MPI's mpirun."""
    path = cluster.mpi("Open MPI")["PATH"]
    folder = Path(path.split(":")[0])
    script(folder, "entrypoint", f'#!/bin/sh\nexec {" ".join(ENTRYPOINT)} "$@"\n').chmod(0o755)
    return {"PATH": path}


def output(cluster: Cluster, job: str) -> str:
    """Return what a job has printed so far."""
    return "".join(path.read_text(errors="replace") for path in cluster.folder.glob(f"train*-{job}.out"))


def wait_for(cluster: Cluster, job: str, words: str, limit_s: float = 60) -> None:
    """Wait until a job has printed something."""
    until = time.monotonic() + limit_s
    while words not in output(cluster, job):
        assert time.monotonic() < until, output(cluster, job)[-3000:]
        time.sleep(0.2)


@pytest.mark.slurm
@pytest.mark.parametrize("file", ["train.sbatch", "train-mpi.sbatch"])
def test_a_batch_script_trains_on_two_nodes(slurm: Slurm, installed: dict[str, str], file: str) -> None:
    job = slurm.submit(FILES / "slurm" / file, env=SHORT | installed)
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(slurm.cluster, job)
    assert slurm.cluster.summary("job")["world_size"] == 2


def test_a_list_of_machines_trains_without_a_scheduler(cluster: Cluster, installed: dict[str, str]) -> None:
    done = cluster.run("node1", FILES / "mpi/train.sh", env=SHORT | installed | {"HOSTS": "node1:2,node2:1"})
    assert done.code == 0, done.out
    assert cluster.summary("job")["world_size"] == 3


@pytest.mark.slurm
@pytest.mark.parametrize(("file", "warn"), [("train.sbatch", ()), ("train-mpi.sbatch", ("--batch",))])
def test_a_warning_saves_requeues_and_the_run_goes_on(
    slurm: Slurm, installed: dict[str, str], file: str, warn: tuple[str, ...]
) -> None:
    job = slurm.submit(FILES / "slurm" / file, env=LONG | installed)
    wait_for(slurm.cluster, job, "epoch 3/")
    slurm.run("scancel", "--signal=USR1", *warn, job)  # what --signal=USR1@120 sends, whom it sends it to
    wait_for(slurm.cluster, job, "preempted: stopped by SIGUSR1: step ")
    wait_for(slurm.cluster, job, "goes back into the queue")
    wait_for(slurm.cluster, job, "going on from runs/job/checkpoint/step-", 120)
    assert slurm.state(job)["Restarts"] == "1"
    saved, on = (int(step) for step in re.findall(r"step[ -]0*(\d+)(?: is saved|\.pt)", output(slurm.cluster, job))[:2])
    assert saved == on, "nothing is done twice"
    slurm.run("scancel", job)


@pytest.mark.slurm
def test_scancel_saves_and_the_job_goes_on_when_it_is_submitted_again(slurm: Slurm, installed: dict[str, str]) -> None:
    job = slurm.submit(FILES / "slurm/train.sbatch", env=LONG | installed)
    wait_for(slurm.cluster, job, "epoch 3/")
    slurm.run("scancel", job)
    assert slurm.ended(job)["JobState"] == "CANCELLED"
    assert sorted((slurm.cluster.folder / "runs/job/checkpoint").glob("step-*.pt"))
    slurm.cluster.gone(20)
    again = slurm.submit(FILES / "slurm/train.sbatch", env=LONG | installed)
    wait_for(slurm.cluster, again, "going on from runs/job/checkpoint/step-")
    slurm.run("scancel", again)


def test_mpirun_ended_by_a_signal_saves(cluster: Cluster, installed: dict[str, str]) -> None:
    one = cluster.start("node1", FILES / "mpi/train.sh", env=LONG | installed)
    one.wait_for("epoch 3/")
    cluster.signal("node1", "mpirun --bind-to", signal.SIGUSR1)
    assert one.code(30) == 75, one.text()[-3000:]
    assert "preempted: stopped by SIGUSR1" in one.text()
    cluster.gone(10)
