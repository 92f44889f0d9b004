"""A job of several nodes that is suspended and resumed goes on."""

from __future__ import annotations

import signal
import time

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster, Slurm, Started

pytestmark = pytest.mark.cluster

# Longer than the launcher waits for a signal, shorter than the limit of a collective.
SUSPENDED_S = 5
AGENTS_AND_RANKS = " train"  # on their command lines
LONG = {"TRAIN_EPOCHS": "100000"}


def goes_on(started: Started) -> None:
    """Wait for two more epochs."""
    last = max(int(line.split()[1].split("/")[0]) for line in started.text().splitlines() if line.startswith("epoch "))
    started.wait_for(f"epoch {last + 2}/")


def test_stopped_agents_and_ranks_go_on(cluster: Cluster) -> None:
    started = cluster.agents("train", env=LONG | {"LAUNCH_NPROC_PER_NODE": "2"})
    started[0].wait_for("epoch 2/")
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for node in ("node1", "node2"):
            assert cluster.signal(node, AGENTS_AND_RANKS, number) >= 3  # the agent and two ranks
        time.sleep(SUSPENDED_S)
    goes_on(started[0])


@pytest.mark.slurm
def test_suspended_slurm_job_goes_on(slurm: Slurm) -> None:
    words = ("srun", "-N2", "-n2", "-c2", "--job-name=suspended", *ENTRYPOINT, "train")
    started = slurm.start(*words, env=LONG)
    started.wait_for("epoch 2/")
    (job,) = slurm.run("squeue", "--noheader", "--name=suspended", "--format=%A").out.split()
    for verb in ("suspend", "resume"):
        slurm.run("scontrol", verb, job).succeeded()
        time.sleep(SUSPENDED_S)
    goes_on(started)
