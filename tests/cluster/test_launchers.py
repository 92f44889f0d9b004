"""Every launcher over two nodes, on real images: losses and accuracy of one process with the same global batch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import ALL, ENTRYPOINT, Cluster, Slurm, Started, in_all, skip_without_nodes
from tests.conftest import LAUNCH_LIMIT_S, script

pytestmark = pytest.mark.cluster

TRAIN = {
    "TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "many", "TRAIN_DATASET": "imagefolder", "TRAIN_DATA_DIR": "cifar10",
    "TRAIN_MODEL": "cnn",  # without BatchNorm or Adam, rounding grows slowly
    "LAUNCH_THREADS": "1",  # both nodes have the same cores here
}  # fmt: skip
# Images of each class.
SUBSET = {"train": 128, "test": 50}
Start = Callable[[Cluster, int], list[Started]]


def by_hand(cluster: Cluster, ranks: int) -> list[Started]:
    """The same command on each node: the nodes' own agents start the ranks."""
    return cluster.agents("train", env=TRAIN | {"LAUNCH_NPROC_PER_NODE": str(ranks)})


def by_mpirun(which: str) -> Start:
    """`entrypoint train --hosts …` on the first node: mpirun starts the ranks."""

    def start(cluster: Cluster, ranks: int) -> list[Started]:
        hosts = f"--hosts=node1:{ranks},node2:{ranks}"
        return [cluster.start("node1", *ENTRYPOINT, "train", hosts, env=TRAIN | cluster.mpi(which))]

    return start


BY_SSH: dict[str, Start] = {
    "by hand": by_hand,
    "mpirun of Open MPI": by_mpirun("Open MPI"),
    "mpirun of hydra": by_mpirun("hydra"),
}
BY_SLURM: dict[str, tuple[str, ...]] = {
    "srun": ("srun", "-N2", "-n{tasks}", "-c{cpus}"),
    "srun with PMI-2": ("srun", "-N2", "-n{tasks}", "-c{cpus}", "--mpi=pmi2"),
    "srun with PMIx": ("srun", "-N2", "-n{tasks}", "-c{cpus}", "--mpi=pmix"),
}


@dataclass(frozen=True)
class Alone:
    """What one process reaches, and its train losses by epoch."""

    accuracy: float
    losses: list[float]


@pytest.fixture(scope="module")
def subset(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The same few of CIFAR-10's images each time."""
    skip_without_nodes()
    cifar10_images: Path = request.getfixturevalue("cifar10_images")  # unpacking them takes long
    folder = tmp_path_factory.mktemp("subset")
    for part, each in SUBSET.items():
        for label in sorted((cifar10_images / part).iterdir()):
            (folder / part / label.name).mkdir(parents=True)
            for image in sorted(label.iterdir())[:each]:
                (folder / part / label.name / image.name).symlink_to(image)
    return folder


@pytest.fixture(autouse=True)
def _with_images(request: pytest.FixtureRequest, subset: Path) -> None:
    if "cluster" in request.fixturenames:
        (request.getfixturevalue("cluster").folder / "cifar10").symlink_to(subset)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, subset: Path) -> Alone:
    one = Cluster("", "", tmp_path_factory.mktemp("alone"))
    (one.folder / "cifar10").symlink_to(subset)
    command = (*ENTRYPOINT, "train")
    subprocess.run(
        command, cwd=one.folder, env=one.environ(TRAIN), check=True, capture_output=True, timeout=LAUNCH_LIMIT_S
    )
    return Alone(one.summary("many")["test_accuracy"], one.losses("many"))


def check(alone: Alone, cluster: Cluster, started: list[Started], world_size: int) -> None:
    codes = [one.code() for one in started]
    assert codes == [0] * len(started), "\n".join(one.text()[-3000:] for one in started)
    assert cluster.summary("many")["world_size"] == world_size
    losses = cluster.losses("many")
    assert losses[0] == pytest.approx(alone.losses[0], rel=1e-4), "to rounding"
    assert losses == pytest.approx(alone.losses, rel=1e-3), "to rounding, which grows from step to step"
    assert cluster.summary("many")["test_accuracy"] == pytest.approx(alone.accuracy, abs=0.5)
    assert "warning" not in "".join(one.text() for one in started)


RANKS = [1, 2] if ALL else [2]


def main_ones(ways: Iterable[str], rarer: str) -> list[Any]:
    """Return the ways to start a job, one of them only where all are asked for."""
    return [pytest.param(way, marks=in_all) if way == rarer else way for way in ways]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", main_ones(BY_SSH, "mpirun of hydra"))
def test_two_nodes_by_ssh_or_manual_start(alone: Alone, cluster: Cluster, name: str, ranks: int) -> None:
    check(alone, cluster, BY_SSH[name](cluster, ranks), 2 * ranks)


@pytest.mark.slurm
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", main_ones(BY_SLURM, "srun with PMI-2"))
def test_two_nodes_by_srun(alone: Alone, slurm: Slurm, name: str, ranks: int) -> None:
    words = [word.format(tasks=2 * ranks, cpus=2 // ranks) for word in BY_SLURM[name]]
    check(alone, slurm.cluster, [slurm.start(*words, *ENTRYPOINT, "train", env=TRAIN)], 2 * ranks)


@pytest.mark.slurm
def test_srun_one_task_per_node_starts_two_ranks(alone: Alone, slurm: Slurm) -> None:
    words = ("srun", "-N2", "-n2", "-c2", *ENTRYPOINT, "train", "--nproc-per-node=2")
    check(alone, slurm.cluster, [slurm.start(*words, env=TRAIN)], 4)


@pytest.mark.slurm
@pytest.mark.parametrize("with_", main_ones(["auto", "mpirun"], "mpirun"))
def test_batch_script_without_srun_trains(alone: Alone, slurm: Slurm, with_: str) -> None:
    cluster = slurm.cluster
    env = TRAIN | {"LAUNCH_LAUNCHER": with_} | (cluster.mpi("Open MPI") if with_ == "mpirun" else {})
    file = script(cluster.folder, "job.sh", f"#!/bin/sh\nexec {' '.join(ENTRYPOINT)} train\n")
    job = slurm.submit(file, "-N2", "--ntasks-per-node=2", "--output=job.out", env=env)
    state = slurm.ended(job)
    out = (cluster.folder / "job.out").read_text()
    assert state["JobState"] == "COMPLETED", out
    check(alone, cluster, [], 4)


def test_books_script_for_several_machines_runs_unchanged(cluster: Cluster) -> None:
    script(
        cluster.folder,
        "book.py",
        """
        import os
        import torch
        import torch.distributed as dist

        os.environ['RANK'] = os.environ['OMPI_COMM_WORLD_RANK']
        os.environ['WORLD_SIZE'] = os.environ['OMPI_COMM_WORLD_SIZE']
        dist.init_process_group(backend='gloo', init_method='env://')
        total = torch.ones(1) * dist.get_rank()
        dist.all_reduce(total)
        print(f'rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}')
        dist.destroy_process_group()
        """,
    )
    env = cluster.mpi("Open MPI") | {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    words = ("mpirun", "-np", "4", "--host", "node1:2,node2:2", "-x", "MASTER_ADDR", "-x", "MASTER_PORT")
    done = cluster.run("node1", *words, *ENTRYPOINT, "run", "book.py", env=env).succeeded()
    assert sorted(line for line in done.out.splitlines() if line.startswith("rank ")) == [
        f"rank {rank} of 4: 6.0" for rank in range(4)
    ]
