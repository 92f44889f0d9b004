"""cluster/ray/train.py over two raylets: it starts, fails, stops and resumes as a job of the entrypoint does.

RAY_PYTHON names a Python whose environment has Ray.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster, Started
from tests.conftest import script
from tests.containers.conftest import REPOSITORY

pytestmark = pytest.mark.cluster

SHOW = """
import json, os
names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
shown = {name: os.environ.get(name) for name in names} | {"cpus": len(os.sched_getaffinity(0))}
print("shown", json.dumps(shown), flush=True)
"""
TASK = """
import json, os, subprocess, sys, ray
ray.init(address="auto", log_to_driver=False)

@ray.remote(num_cpus=1, num_gpus=1)
def task(command, cpus):
    os.sched_setaffinity(0, cpus)
    return os.environ.get("OMP_NUM_THREADS"), subprocess.run(command, capture_output=True, text=True).stdout

own = sorted(os.sched_getaffinity(0))
for cpus in (own, own[:1]):
    threads, out = ray.get(task.remote(sys.argv[1:], cpus))
    print(threads, out)
"""


@dataclass
class Ray:
    """Two raylets, one on each node, with as many CPUs as the machine has and a GPU that is none."""

    cluster: Cluster
    python: str
    environ: dict[str, str]

    def start(
        self, *words: str, cpus: int, env: dict[str, str] | None = None, command: str = " ".join(ENTRYPOINT)
    ) -> Started:
        """Start a job, as a user does on the first node."""
        options = ("--nodes=2", f"--cpus={cpus}", "--gpus=1", f"--command={command}", "--restarts=2")
        file = REPOSITORY / "cluster/ray/train.py"
        return self.cluster.start("node1", self.python, file, *options, "--", *words, env=self.environ | (env or {}))


@pytest.fixture
def two_raylets(cluster: Cluster) -> Iterator[Ray]:
    python = os.environ.get("RAY_PYTHON", "")
    if not python:
        pytest.skip("needs Ray: RAY_PYTHON names no Python that has it")
    address = cluster.run("node1", "hostname", "-I").out.split()[0]
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # the names of Ray's sockets are long
    common = (f"--num-cpus={os.cpu_count()}", "--num-gpus=1", "--object-store-memory=100000000")
    ray = (Path(python).with_name("ray"), "start", *common, "--disable-usage-stats")
    try:
        for number, role in (
            (1, ("--head", "--port=6379", "--include-dashboard=false")),
            (2, (f"--address={address}:6379",)),
        ):
            own = cluster.run(f"node{number}", "hostname", "-I").out.split()[0]
            words = (*ray, *role, f"--node-ip-address={own}", f"--temp-dir={folder}/{number}")
            cluster.run(f"node{number}", *words).succeeded()
        yield Ray(cluster, python, {"RAY_ADDRESS": f"{address}:6379"})
    finally:
        cluster.do("down")  # before their folder goes
        shutil.rmtree(folder, ignore_errors=True)


def shown_by(text: str) -> list[dict[str, str | int | None]]:
    """Return what the ranks of SHOW have printed, by rank."""
    lines = (line.partition("shown ")[2] for line in text.splitlines() if "shown {" in line)
    return sorted(map(json.loads, lines), key=lambda one: int(one["RANK"]))


def test_ranks_get_what_ray_gave(two_raylets: Ray) -> None:
    cluster, all_cpus = two_raylets.cluster, os.cpu_count() or 1
    show = str(script(cluster.folder, "show.py", SHOW))
    alone = shown_by(cluster.run("node1", *ENTRYPOINT, "run", show).out)[0]
    task = script(cluster.folder, "task.py", TASK)
    done = cluster.run("node1", two_raylets.python, task, *ENTRYPOINT, "run", show, env=two_raylets.environ).succeeded()
    assert [line for line in done.out.splitlines() if line.startswith("1 shown")], "Ray itself sets OMP_NUM_THREADS=1"
    of_all, of_one = shown_by(done.out)
    assert of_all == alone | {"CUDA_VISIBLE_DEVICES": "0"}, "nobody wished for a single thread"
    assert (of_one["OMP_NUM_THREADS"], of_one["cpus"]) == ("1", 1)

    reserved = {"LAUNCH_RESERVE_CPUS": ""}  # the tests' own wins over what the script sets
    for cpus, threads, env in ((all_cpus, alone["OMP_NUM_THREADS"], {}), (1, "1", reserved)):
        job = two_raylets.start("run", show, cpus=cpus, env=env)
        assert job.code() == 0, job.text()[-3000:]
        ranks = shown_by(job.text())
        assert [(one["RANK"], one["WORLD_SIZE"], one["OMP_NUM_THREADS"]) for one in ranks] == [
            (str(rank), "2", threads) for rank in range(2)
        ]


def test_job_fails_resumes_and_stops(two_raylets: Ray) -> None:
    cluster = two_raylets.cluster
    wrong = two_raylets.start("train", "--model=nix", cpus=1)
    assert wrong.code() == 2
    assert "train.py: node " in wrong.text()
    assert " ended with 2: entrypoint: error: TRAIN_MODEL=nix: no such model." in wrong.text()
    assert "starts again" not in wrong.text()
    missing = two_raylets.start("train", cpus=1, command="/nowhere/entrypoint")
    assert missing.code() == 3, "no traceback of Ray's"
    assert "/nowhere/entrypoint" in missing.text().splitlines()[-1]

    long = {"TRAIN_EPOCHS": "100000", "TRAIN_CHECKPOINT_EVERY": "20", "TRAIN_RUN_NAME": "job"}
    job = two_raylets.start("train", cpus=1, env=long)
    job.wait_for("epoch 2/", 120)
    assert cluster.signal("node2", "entrypoint train", signal.SIGTERM)  # as a cloud's notice does
    job.wait_for("ended with 75: entrypoint: preempted: stopped by ")
    job.wait_for("starts again; 1 restarts are left")
    job.wait_for("resuming from runs/job/checkpoint/step-")
    job.wait_for("images/s")
    assert cluster.signal("node2", "ray::Node", signal.SIGKILL)
    job.wait_for(" is lost: ")
    job.wait_for("starts again; 0 restarts are left")
    cluster.wait_for_file(Path("runs/job/metrics.jsonl"))
    steps = len((cluster.folder / "runs/job/metrics.jsonl").read_text().splitlines())
    while len((cluster.folder / "runs/job/metrics.jsonl").read_text().splitlines()) <= steps:
        assert job.process.poll() is None, job.text()[-3000:]
    assert cluster.signal("node1", "ray/train.py", signal.SIGTERM)
    assert job.code(60) == 75, job.text()[-3000:]
    cluster.gone(20)
