"""What the tests of the batch scripts in cluster/ share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster
from tests.conftest import script
from tests.containers.conftest import REPOSITORY

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


def wait_for(cluster: Cluster, job: str, words: str, limit_s: float = 180) -> None:
    """Wait until a job has printed something."""
    until = time.monotonic() + limit_s
    while words not in output(cluster, job):
        assert time.monotonic() < until, f"no {words!r} within {limit_s} s: {output(cluster, job)[-3000:]}"
        time.sleep(0.2)
