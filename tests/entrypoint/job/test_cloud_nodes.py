"""The nodes of a job by what SageMaker, Vertex AI and Kubernetes' Indexed Jobs give each of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.core.errors import ExitCode
from entrypoint.job import cloud_nodes
from entrypoint.job.detect import detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.job.node_group import NodeGroup
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal

TOOLKIT_FREE = {"TRAINING_JOB_NAME": "pets", "TRAINING_JOB_ARN": "arn:aws:sagemaker:eu-west-1:1:training-job/pets"}


def read(environ: dict[str, str]) -> NodeGroup:
    return detect_node_group(read_launch_settings(environ, {}), environ, detect_job(environ))


@pytest.fixture
def resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "resourceconfig.json"
    monkeypatch.setattr(cloud_nodes, "RESOURCE_CONFIG", file)
    return file


def test_sagemaker_toolkit_wins_over_file(resources: Path) -> None:
    resources.write_text("not read")
    toolkit = {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}
    assert read(TOOLKIT_FREE | toolkit).source.startswith("SM_HOSTS=")


def test_sagemaker_job_of_one_host_trains_alone(resources: Path) -> None:
    resources.write_text(json.dumps({"current_host": "algo-1", "hosts": ["algo-1"]}))
    assert read(TOOLKIT_FREE).nnodes == 1
    resources.unlink()
    assert read(TOOLKIT_FREE) == NodeGroup()  # another platform's variable of that name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not a JSON object"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
        ('{"current_host": "algo-1"}', "current_host=algo-1: not among the hosts of"),
        ('{"current_host": "algo-9", "hosts": ["algo-1"]}', "current_host=algo-9: not among the hosts of"),
        ('{"hosts": ["algo-1", "algo-2"]}', "current_host=: not among the hosts of"),
    ],
)
def test_sagemaker_file_that_tells_nothing_is_refused(resources: Path, text: str, said: str) -> None:
    resources.write_text(text)
    refusal(read, TOOLKIT_FREE, match=said)


def test_sagemaker_file_that_cannot_be_read_is_refused(resources: Path) -> None:
    resources.mkdir()
    refusal(read, TOOLKIT_FREE, match=r"with the job's hosts cannot be read .*Set LAUNCH_NNODES", code=ExitCode.MACHINE)


def vertex(pool: str, index: int, **more: Any) -> dict[str, str]:
    name = "cmle-training-workerpool{}-ab-{}:2222"
    cluster = {
        "workerpool0": [name.format(0, 0)],
        "workerpool1": [name.format(1, 0), name.format(1, 1)],
        "workerpool2": [name.format(2, 0)],
    }
    spec = {"cluster": cluster, "environment": "cloud", "task": {"type": pool, "index": index}, **more}
    return {"CLUSTER_SPEC": json.dumps(spec)}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (vertex("workerpool2", 0), "this is workerpool2, a pool of servers or evaluators"),
        (vertex("workerpool1", 2), "CLUSTER_SPEC's task=3: CLUSTER_SPEC nodes, counted from 0"),
        (vertex("workerpool0", 0, task=None), "has no cluster or no task"),
        (vertex("workerpool0", 0, task={"type": "workerpool0", "index": "x"}), "has no cluster or no task"),
        (vertex("workerpool0", 0, cluster={"workerpool0": 4}), "has no cluster or no task"),
        ({"CLUSTER_SPEC": '{"workerpool0"'}, "not a JSON object"),
        (vertex("workerpool1", 0) | {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "a"}, "contradict each other"),
    ],
)
def test_vertex_variable_that_cannot_be_meant_is_refused(environ: dict[str, str], said: str) -> None:
    refusal(read, environ, match=said)


INDEXED = {"JOB_COMPLETION_INDEX": "1"}


def test_indexed_pod_is_node_of_its_index() -> None:
    found = read(INDEXED | {"LAUNCH_NNODES": "2", "MASTER_ADDR": "pets-0.pets"})
    assert (found.nnodes, found.node_rank, found.master_addr) == (2, 1, "pets-0.pets")
    by_hand = read(INDEXED | {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "0", "MASTER_ADDR": "pets-0.pets"})
    assert by_hand.node_rank == 0


@pytest.mark.parametrize("index", ["0", "1", "x"])
def test_indexed_pod_never_trains_alone_unasked(index: str) -> None:
    refusal(
        read,
        {"JOB_COMPLETION_INDEX": index},
        match=f"JOB_COMPLETION_INDEX={index}: this pod does not say whether the pods",
    )
    assert read({"JOB_COMPLETION_INDEX": index, "LAUNCH_NNODES": "1"}) == NodeGroup()
    assert read({"JOB_COMPLETION_INDEX": index, "LAUNCH_LAUNCHER": "direct"}) == NodeGroup()


def test_indexed_pod_of_a_wrong_number_is_refused() -> None:
    refusal(
        read,
        {"JOB_COMPLETION_INDEX": "2", "LAUNCH_NNODES": "2", "MASTER_ADDR": "a"},
        match="JOB_COMPLETION_INDEX=2: there are LAUNCH_NNODES=2 nodes, counted from 0",
    )
