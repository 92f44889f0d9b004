"""Nodes that come, go and fail while a run goes on, which ends with the accuracy of one that nothing happened to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster, Started, in_all, skip_without_nodes
from tests.conftest import LAUNCH_LIMIT_S

pytestmark = pytest.mark.cluster

TRAIN = {"TRAIN_EPOCHS": "40", "TRAIN_RUN_NAME": "many", "TRAIN_CHECKPOINT_EVERY": "2"}
NODES = TRAIN | {
    "LAUNCH_NNODES": "1:2",
    "MASTER_ADDR": "node1",
    "LAUNCH_COLLECTIVE_TIMEOUT_S": "10",
    "LAUNCH_THREADS": "1",
}


def agent(cluster: Cluster, number: int, **more: str) -> Started:
    """Start the command on a node, numbered from 0."""
    return cluster.agents("train", env=NODES | more, numbers=[number])[0]


@pytest.fixture(scope="module")
def accuracy(tmp_path_factory: pytest.TempPathFactory) -> float:
    """What one process reaches that nothing happens to."""
    skip_without_nodes()
    one = Cluster("", "", tmp_path_factory.mktemp("alone"))
    words = (*ENTRYPOINT, "train")
    subprocess.run(
        words, cwd=one.folder, env=one.environ(TRAIN), check=True, capture_output=True, timeout=LAUNCH_LIMIT_S
    )
    return float(one.summary("many")["test_accuracy"])


def ended_well(cluster: Cluster, accuracy: float, world_size: int, started: Started) -> None:
    """Check that a run has come to its end, with so many ranks in the end."""
    assert started.code() == 0, started.text()[-3000:]
    found = cluster.summary("many")
    assert (found["world_size"], found["epochs"]) == (world_size, 40)
    assert found["test_accuracy"] == pytest.approx(accuracy, abs=0.5)
    assert re.search(r"resuming from \S+/checkpoint/step-\d+", started.text()), started.text()[-3000:]
    assert "Traceback" not in started.text()


def test_killed_rank_restarts_all_ranks(cluster: Cluster, accuracy: float) -> None:
    one, two = agent(cluster, 0), agent(cluster, 1)
    cluster.wait_for_file(Path("runs/many/checkpoint"))
    assert cluster.signal("node2", "--module train", signal.SIGKILL) == 1
    two.wait_for("entrypoint: restart 1 of 3: rank 1 on node2 failed first: killed by SIGKILL")
    assert two.code() == 0, two.text()[-3000:]
    ended_well(cluster, accuracy, 2, one if "resuming from" in one.text() else two)


@pytest.mark.parametrize("restarts", [0, 1])
def test_job_ends_where_one_node_alone_restarts_ranks(cluster: Cluster, restarts: int) -> None:
    """The agent of node 0 goes on waiting for others like it."""
    env = {"TRAIN_RUN_NAME": "many"}
    started = [
        *cluster.agents("train", numbers=[restarts], env=env | {"LAUNCH_MAX_RESTARTS": "2"}),
        *cluster.agents("train", numbers=[1 - restarts], env=env),
    ]
    said = "not all nodes restart failed ranks. Set LAUNCH_MAX_RESTARTS alike on all of them."
    for one in started if restarts else started[1:]:
        assert one.code(60) == 4, one.text()
        assert one.text().splitlines()[-1].endswith(said)
    started[0].wait_for(said)


def test_elastic_job_continues_without_lost_node(cluster: Cluster, accuracy: float) -> None:
    one, _ = agent(cluster, 0), agent(cluster, 1)
    cluster.wait_for_file(Path("runs/many/checkpoint"))
    cluster.do("kill", "node2")
    cluster.count = 1
    ended_well(cluster, accuracy, 1, one)


@in_all
def test_elastic_job_continues_without_stopped_node(cluster: Cluster, accuracy: float) -> None:
    one, two = agent(cluster, 0), agent(cluster, 1)
    cluster.wait_for_file(Path("runs/many/checkpoint"))
    assert cluster.signal("node2", "entrypoint.launch.torchrun", signal.SIGTERM) == 1
    assert two.code(60) == 75, two.text()
    assert "entrypoint: preempted: stopped by SIGTERM" in two.text()
    ended_well(cluster, accuracy, 1, one)


@in_all
def test_elastic_job_accepts_later_node(cluster: Cluster) -> None:
    one = agent(cluster, 0, TRAIN_EPOCHS="2000")
    one.wait_for("epoch 7/")
    two = agent(cluster, 1, TRAIN_EPOCHS="2000")
    one.wait_for("resuming from ")
    cluster.signal("node1", "entrypoint.launch.torchrun", signal.SIGUSR1)
    cluster.signal("node2", "entrypoint.launch.torchrun", signal.SIGUSR1)
    assert (one.code(60), two.code(60)) == (75, 75), one.text() + two.text()
    assert "restart" not in one.text() + two.text(), "a scheduler's warning is no failure"


def test_late_node_is_awaited_by_name(cluster: Cluster) -> None:
    one = agent(cluster, 0, LAUNCH_NNODES="2", TRAIN_EPOCHS="2")
    one.wait_for("entrypoint: waiting for rank 1 (")
    two = agent(cluster, 1, LAUNCH_NNODES="2", TRAIN_EPOCHS="2")
    assert (one.code(), two.code()) == (0, 0), one.text() + two.text()


@pytest.mark.parametrize("late", [0, 1])
def test_missing_node_ends_the_other_with_4(cluster: Cluster, late: int) -> None:
    one = agent(cluster, 1 - late, LAUNCH_NNODES="2", TRAIN_EPOCHS="2", LAUNCH_RENDEZVOUS_TIMEOUT_S="4")
    assert one.code(60) == 4, one.text()
    missing = "rank 0 at node1, port" if late == 0 else "rank 1 did not join within 4 s"
    assert missing in one.text().splitlines()[-1]


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp"])
def test_run_in_storage_goes_on_on_other_machines(parallelism: str, cluster: Cluster, accuracy: float) -> None:
    """Each start has new caches: of a run whose machines were lost, storage has what was uploaded."""
    place = {"TRAIN_OUTPUT_DIR": f"file://{cluster.folder}/bucket", "TRAIN_RESUME": "auto", "LAUNCH_NNODES": "2"}
    place["TRAIN_PARALLELISM"] = parallelism

    def start(machines: str) -> list[Started]:
        caches = [str(cluster.folder / f"{machines}{number}") for number in (0, 1)]
        return [agent(cluster, number, **place, XDG_CACHE_HOME=cache) for number, cache in enumerate(caches)]

    first = start("first")
    first[0].wait_for("epoch 5/40  train loss")
    saved = list(cluster.folder.glob("bucket/many/checkpoint/step-*/SHA256SUMS"))
    assert saved, "what was saved before is there"
    newest = max(saved).parent  # older ones are removed meanwhile
    assert len(list(newest.glob("rank-*"))) == (2 if parallelism == "fsdp" else 0)
    assert cluster.signal("node2", "--module train", signal.SIGKILL) == 1
    assert [one.code(60) for one in first] == [5, 5], first[0].text()
    second = start("second")
    second[0].wait_for("resuming from ")
    second[0].wait_for("train loss")
    for node in ("node1", "node2"):
        cluster.signal(node, "ep-agent", signal.SIGTERM)
    assert [one.code(60) for one in second] == [75, 75], second[0].text()
    assert f"is saved in file://{cluster.folder}/bucket/many/checkpoint" in second[0].text() + second[1].text()
    third = start("third")
    assert [one.code() for one in third] == [0, 0], third[0].text()[-3000:]
    assert re.search(r"resuming from \S+/checkpoint/step-\d+", third[0].text())
    (summary,) = cluster.folder.glob("third0/reference-training/runs/*/many/summary.json")
    assert json.loads(summary.read_text())["test_accuracy"] == pytest.approx(accuracy, abs=0.5)
