"""Environments of launchers and platforms, read as jobs: each process finds its place, or is refused.

`launches.json` has what real launchers set: `python -m tests.cluster.record` records it again.
`documented.json` has what others document, and names the source of each: a file at a commit, or a page. Paths, job ids
and addresses are examples there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.job import cloud_nodes
from entrypoint.job.allocation import read_allocation, with_allocation
from entrypoint.job.detect import Job, detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.job.node_group import NodeGroup
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal

LAUNCHES = json.loads(Path(__file__).with_name("documented.json").read_text())
NAMES = [one["launch"] for one in LAUNCHES]
# What does not tell enough, and the variable that the refusal names. The values of some differ between processes.
REFUSED = {
    "HPE PALS mpiexec": "PALS_RANKID=",
    "HPE PALS mpiexec (1 node x 1 rank)": "PALS_RANKID=",
    "HPE PALS aprun": "(ALPS_APP_PE|PALS_RANKID)=",
    "HPE PALS aprun (1 node x 1 rank)": "ALPS_APP_PE=",
    "Cray ALPS aprun": "ALPS_APP_PE=",
    "Cray ALPS aprun (1 node x 1 rank)": "ALPS_APP_PE=",
    "Flux flux run": "FLUX_JOB_SIZE=4: Flux does not say how many of these ranks are on this node",
    "Flux flux run -opmi=cray-pals": "FLUX_JOB_SIZE=4: Flux does not say how many",
    "LSF jsrun": "JSM_NAMESPACE_SIZE=4: jsrun does not say how many",
    "LSF blaunch": "LSF_PM_TASKID=",
    "OpenPBS pbsdsh": "PBS_TASKNUM=",
    "Torque pbsdsh": "(PBS_TASKNUM|PBS_NUM_NODES)=",
    "Volcano svc and env plugins only (one task 'train' with 2 replicas)": "VC_TRAIN_NUM=2",
    "Volcano mpi plugin (master and 2 workers)": "VC_",
    "Kubeflow Trainer v2 TrainJob, OpenMPI runtime (launcher pod, then 2 node pods)": "JOB_COMPLETION_INDEX=",
    "MPIJob v2beta1 OpenMPI: launcher pod, then 2 worker pods": "K_MPI_JOB_ROLE=",
    "MPIJob v2beta1 Intel: launcher pod, then 2 worker pods": "K_MPI_JOB_ROLE=",
    "MPIJob v2beta1 MPICH: launcher pod, then 2 worker pods": "K_MPI_JOB_ROLE=",
    "Kubernetes Indexed Job": "JOB_COMPLETION_INDEX=",
    "JobSet (one replicated job 'node', 1 replica, 2 pods)": "JOB_COMPLETION_INDEX=",
    "JobSet (replicated job 'node' with 2 replicas of 1 pod)": "JOB_COMPLETION_INDEX=0",
    "Azure ML PyTorch distribution (process_count_per_instance 2)": "WORLD_SIZE=4: the launcher does not say how many",
    "AWS Batch multi-node parallel": "AWS_BATCH_JOB_NUM_NODES=2",
    "AWS Batch multi-node parallel, main node is index 1": "AWS_BATCH_JOB_NUM_NODES=2",
    "HTCondor parallel universe": "_CONDOR_NPROCS=2",
    "Lightning AI multi-node (documented for inference deployments)": "NUM_NODES=2",
    "Google Cloud Batch, 2 tasks": "BATCH_TASK_COUNT=2",
    "Azure Batch multi-instance task": "AZ_BATCH_HOST_LIST=",
    "Fujitsu PJM batch script": "PJM_NODE=2",
    "horovodrun --gloo": "HOROVOD_SIZE=4",
}
# Elastic pods get no rank; only the own host name of the master shows it.
WITHOUT_RANK = {"Kubeflow PyTorchJob v1 elastic (workers only)"}
# Servers and evaluators, which have a process of their own there.
NOT_ALL_TRAIN = {"Vertex AI custom training, worker pools 0..3 (reduction server in pool 2, evaluators in pool 3)": 3}


def names_of(kind: str) -> list[str]:
    return [one["launch"] for one in LAUNCHES if one["kind"] == kind and one["launch"] not in REFUSED]


def placed(launch: dict[str, Any], index: int, folder: Path, patch: pytest.MonkeyPatch) -> tuple[Job, NodeGroup]:
    """Return what one process finds, with the platform's files in a folder."""
    environ = dict(launch["environments"][index])
    node = index // launch["ranks"] + 1
    for path, text in launch.get("files", {}).items():
        path, _, host = path.partition("#")
        if host and host != f"algo-{node}":
            continue
        file = folder / Path(path).name
        file.write_text(text)
        environ = {name: str(file) if value == path else value for name, value in environ.items()}
        if file.name == "resourceconfig.json":
            patch.setattr(cloud_nodes, "RESOURCE_CONFIG", file)
    job = with_allocation(detect_job(environ), read_allocation(environ), f"node{node}")
    return job, detect_node_group(read_launch_settings(environ, {}), environ, job)


@pytest.mark.parametrize("name", REFUSED)
def test_process_that_cannot_know_its_rank_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    launch = LAUNCHES[NAMES.index(name)]
    for index, environ in enumerate(launch["environments"]):
        if not environ:  # a pod that waits for mpirun's ssh
            continue
        refusal(placed, launch, index, tmp_path, monkeypatch, match=f"^{REFUSED[name]}")


@pytest.mark.parametrize("name", names_of("ranks"))
def test_ranks_find_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launch = LAUNCHES[NAMES.index(name)]
    total = launch["nodes"] * launch["ranks"]
    found = [placed(launch, index, tmp_path, monkeypatch)[0] for index in range(total)]
    if total == 1:
        assert found[0].world_size == 1
        return
    assert [job.rank for job in found] == list(range(total))
    assert {(job.world_size, job.local_world_size) for job in found} == {(total, launch["ranks"])}
    assert [job.local_rank for job in found] == [*range(launch["ranks"])] * launch["nodes"]


@pytest.mark.parametrize("name", names_of("nodes"))
def test_nodes_find_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launch = LAUNCHES[NAMES.index(name)]
    count = NOT_ALL_TRAIN.get(name, launch["nodes"])
    found = [placed(launch, index, tmp_path, monkeypatch)[1] for index in range(count)]
    assert {group.nnodes for group in found} == {count}
    if name not in WITHOUT_RANK:
        assert [group.node_rank for group in found] == list(range(count))
    if count > 1:
        assert len({group.master_addr for group in found}) == 1
        assert found[0].master_addr
    for index in range(count, len(launch["environments"])):
        refusal(placed, launch, index, tmp_path, monkeypatch, match="a pool of servers or evaluators")


@pytest.mark.parametrize("name", names_of("batch"))
def test_batch_scripts_know_their_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    launch = LAUNCHES[NAMES.index(name)]
    job, group = placed(launch, 0, tmp_path, monkeypatch)
    assert (job.launcher, group) == (None, NodeGroup())
    if name == "Flux flux batch":  # it has no list of hosts, which the plan says
        assert job.hidden_hosts
    elif launch["nodes"] > 1:
        assert [host for host in job.hostnames if host != "batch5"] == ["node1", "node2"]


RECORDED = json.loads((Path(__file__).parent / "launches.json").read_text())
LAUNCHER_NAMES = {"hydra": "hydra (MPICH, Intel MPI)", "Open MPI 5": "Open MPI"}
IDS = [f"{one['launch']}, {one['nodes']} x {one['ranks']}" for one in RECORDED]


def jobs_of(launch: dict[str, Any]) -> list[Job]:
    return sorted(map(detect_job, launch["environments"]), key=lambda job: job.rank)


@pytest.mark.parametrize("launch", RECORDED, ids=IDS)
def test_recorded_launch_gives_every_rank(launch: dict[str, Any]) -> None:
    found, total = jobs_of(launch), launch["nodes"] * launch["ranks"]
    name = launch["launch"].partition(" in an")[0].partition(" --")[0].partition(",")[0]
    assert {job.launcher for job in found} == {LAUNCHER_NAMES.get(name, name)}
    assert [job.rank for job in found] == list(range(total))
    assert {job.world_size for job in found} == {total}
    assert [job.local_rank for job in found] == [*range(launch["ranks"])] * launch["nodes"]
    assert {job.local_world_size for job in found} == {launch["ranks"]}
    assert {job.on_one_node for job in found} == {launch["nodes"] == 1}


@pytest.mark.parametrize("launch", [one for one in RECORDED if one["nodes"] > 1 and one["launch"] != "hydra"])
def test_master_addr_follows_from_the_launchers_variables(launch: dict[str, Any]) -> None:
    masters = {job.master_addr for job in jobs_of(launch)}
    assert len(masters) == 1
    assert masters <= {"node1", "10.78.0.1"}


@pytest.mark.parametrize("launch", RECORDED, ids=IDS)
def test_ranks_of_one_job_agree_on_its_id(launch: dict[str, Any]) -> None:
    assert len({job.job_id for job in jobs_of(launch)}) == 1
