"""Every launcher with 1, 2 and 3 nodes, and 1, 2 or an uneven number of ranks on each: the losses of one process.

Slurm, Open MPI 4 and 5, hydra and Grid Engine are real ones. PBS is its variables and files with a real Open MPI. PALS,
Flux and jsrun are `stand_in_launcher.py`, Kubernetes the variables of a TrainJob's pods.
By default each launcher and each layout is tried about once; CLUSTER_ALL=1 tries all pairs.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.batch_scripts import FILES, installed as installed, output
from tests.cluster.conftest import ENTRYPOINT, Cluster, GridEngine, Slurm, Started, in_all, running_nodes
from tests.conftest import LAUNCH_LIMIT_S, script

pytestmark = pytest.mark.cluster

Layout = tuple[int, ...]
# The ranks on each node. 60 images a batch can be divided by each number of ranks.
LAYOUTS: dict[str, Layout] = {
    "1": (1,), "2": (2,), "1+1": (1, 1), "2+2": (2, 2), "2+1": (2, 1), "1+1+1": (1, 1, 1), "2+2+2": (2, 2, 2),
    "2+1+1": (2, 1, 1),
}  # fmt: skip
TRAIN = {"TRAIN_EPOCHS": "2", "TRAIN_RUN_NAME": "many", "TRAIN_BATCH_SIZE": "60", "LAUNCH_THREADS": "1"}
Start = Callable[[pytest.FixtureRequest, Cluster, Layout], list[Started]]
STAND_IN = Path(__file__).with_name("stand_in_launcher.py")


def host_list(layout: Layout) -> str:
    """Return `node1:2,node2:1`."""
    return ",".join(f"node{number}:{ranks}" for number, ranks in enumerate(layout, 1))


def by_srun(request: pytest.FixtureRequest, _: Cluster, layout: Layout) -> list[Started]:
    """Slurm fills the nodes in turn, so that the first of them has one rank more."""
    slurm: Slurm = request.getfixturevalue("slurm")
    words = ("srun", f"-N{len(layout)}", f"-n{sum(layout)}", "-c1", *ENTRYPOINT, "train")
    return [slurm.start(*words, env=TRAIN)]


def by_srun_of_a_batch_script(request: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    """The script starts the entrypoint alone, which finds the nodes of the job and starts srun."""
    slurm: Slurm = request.getfixturevalue("slurm")
    file = script(cluster.folder, "job.sh", f"#!/bin/sh\nexec {' '.join(ENTRYPOINT)} train\n")
    job = slurm.submit(file, f"-N{len(layout)}", f"--ntasks-per-node={layout[0]}", "--output=job.out", env=TRAIN)
    assert slurm.ended(job)["JobState"] == "COMPLETED", (cluster.folder / "job.out").read_text()
    return []


def by_hand(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    """The same command on each node: the nodes' own agents start the ranks."""
    env = TRAIN | {"LAUNCH_NNODES": str(len(layout)), "LAUNCH_NPROC_PER_NODE": str(layout[0])}
    return cluster.agents("train", env=env, numbers=range(len(layout)))


def by_hosts(which: str) -> Start:
    """`entrypoint train --hosts …` on the first node: mpirun starts the ranks."""

    def start(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
        words = (*ENTRYPOINT, "train", f"--hosts={host_list(layout)}")
        return [cluster.start("node1", *words, env=TRAIN | cluster.mpi(which))]

    return start


def by_open_mpi(version: str) -> Start:
    """Return the way of Open MPI's mpirun, which passes the variables that are named."""

    def start(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
        env = TRAIN | cluster.mpi(version)
        passed = [word for name in (*TRAIN, "TRAIN_TENSORBOARD") for word in ("-x", name)]
        words = ("mpirun", "-np", str(sum(layout)), "--host", host_list(layout), *passed, *ENTRYPOINT, "train")
        return [cluster.start("node1", *words, env=env)]

    return start


def by_hydra(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    hosts = ("-n", str(sum(layout)), "-hosts", host_list(layout), "-genv", "MASTER_ADDR", "node1")
    return [cluster.start("node1", "mpirun", *hosts, *ENTRYPOINT, "train", env=TRAIN | cluster.mpi("hydra"))]


def by_grid_engine(request: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    """Its batch script, on slots of the parallel environment: it fills the hosts in turn. A slot is a CPU."""
    grid_engine: GridEngine = request.getfixturevalue("grid_engine")
    installed: dict[str, str] = request.getfixturevalue("installed")
    env = TRAIN | installed | {"IMAGE": "", "LAUNCH_NPROC_PER_NODE": str(max(layout))}
    job = grid_engine.submit(FILES / "grid-engine/train.sge", "-pe", "mpi", str(sum(layout)), env=env)
    record = grid_engine.ended(job)
    assert record["exit_status"] == "0", output(cluster, job)[-3000:]
    return []


def by_pbs(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    """Its file lists the hosts: OpenPBS once for each MPI process of a chunk, Torque once for each CPU."""
    file = script(cluster.folder, "hosts", "".join(f"node{number}\n" for number, _ in enumerate(layout, 1)))
    env = {"PBS_JOBID": "7.server", "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_NODEFILE": str(file), "NCPUS": "2"}
    env["LAUNCH_NPROC_PER_NODE"] = str(max(layout))
    return [cluster.start("node1", *ENTRYPOINT, "train", env=TRAIN | env | cluster.mpi("Open MPI"))]


def by_stand_in(kind: str) -> Start:
    """Return the way of a launcher that cannot be had here; it does not say where rank 0 is, as batch scripts do."""

    def start(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
        env = TRAIN | {"SSH_CONFIG": cluster.ssh, "STAND_IN_HOSTS": host_list(layout), "MASTER_ADDR": "node1"}
        env |= {"LOCAL_WORLD_SIZE": str(layout[0])} if kind == "Flux" else {}
        words: tuple[str | Path, ...] = (sys.executable, STAND_IN, kind, *ENTRYPOINT, "train")
        return [cluster.start("node1", *words, env=env)]

    return start


def by_kubernetes(_: pytest.FixtureRequest, cluster: Cluster, layout: Layout) -> list[Started]:
    """The pods of a TrainJob (kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go).

    PET_NPROC_PER_NODE is one per CPU by default, so a number of CPUs is not taken for what the user wants.
    """
    pets = {
        "PET_NNODES": str(len(layout)), "PET_NPROC_PER_NODE": "auto", "PET_MASTER_ADDR": "node1",
        "PET_MASTER_PORT": "29500", "LAUNCH_NPROC_PER_NODE": str(layout[0]),
    }  # fmt: skip
    return [
        cluster.start(f"node{pod + 1}", *ENTRYPOINT, "train", env=TRAIN | pets | {"PET_NODE_RANK": str(pod)})
        for pod in range(len(layout))
    ]


LAUNCHERS: dict[str, Start] = {
    "Slurm": by_srun,
    "Slurm's batch script": by_srun_of_a_batch_script,
    "hydra": by_hydra,
    "by hand": by_hand,
    "hosts of Open MPI": by_hosts("Open MPI"),
    "Open MPI 4": by_open_mpi("Open MPI"),
    "Open MPI 5": by_open_mpi("Open MPI 5"),
    "hosts of hydra": by_hosts("hydra"),
    "Grid Engine": by_grid_engine,
    "PBS": by_pbs,
    "PALS": by_stand_in("PALS"),
    "jsrun": by_stand_in("jsrun"),
    "Flux": by_stand_in("Flux"),
    "Kubernetes": by_kubernetes,
}
# Pods of a TrainJob are alike, and slots of Grid Engine and PBS are CPUs: as many ranks start on each node. Flux does
# not say how many ranks of an uneven job a node has, and the run is refused (test_documented_launches.py).
EVEN_ONLY = ("Kubernetes", "Grid Engine", "PBS", "Flux", "Slurm's batch script", "by hand")


def pairs() -> Iterator[Any]:
    """Yield each launcher with each layout; by default launchers and layouts in turn, each about once."""
    for (row, launcher), (column, name) in itertools.product(enumerate(LAUNCHERS), enumerate(LAYOUTS)):
        if launcher in EVEN_ONLY and len(set(LAYOUTS[name])) > 1:
            continue
        main = (3 * row + 2) % len(LAYOUTS) == column
        yield pytest.param(launcher, LAYOUTS[name], marks=() if main else in_all, id=f"{launcher}-{name}")


@pytest.fixture
def cluster(tmp_path: Path, layout: Layout) -> Iterator[Cluster]:
    """As many nodes as the layout has."""
    yield from running_nodes(tmp_path, len(layout))


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process."""
    one = Cluster("", "", tmp_path_factory.mktemp("alone"))
    subprocess.run(
        (*ENTRYPOINT, "train", "--nproc-per-node=1"), cwd=one.folder, env=one.environ(TRAIN), check=True,
        capture_output=True, timeout=LAUNCH_LIMIT_S,
    )  # fmt: skip
    return one.losses("many")


@pytest.mark.slurm
@pytest.mark.parametrize(("launcher", "layout"), list(pairs()))
def test_losses_are_those_of_one_process(
    request: pytest.FixtureRequest, cluster: Cluster, losses_alone: list[float], launcher: str, layout: Layout
) -> None:
    started = LAUNCHERS[launcher](request, cluster, layout)
    codes = [one.code() for one in started]
    assert codes == [0] * len(started), "\n".join(one.text()[-3000:] for one in started)
    ranks = json.loads((cluster.folder / "runs/many/ranks.json").read_text())
    on_nodes = Counter(one["node"] for one in ranks)
    assert on_nodes == {f"node{number}": count for number, count in enumerate(layout, 1)}
    assert cluster.losses("many") == pytest.approx(losses_alone, rel=1e-3), "to rounding, which grows"
