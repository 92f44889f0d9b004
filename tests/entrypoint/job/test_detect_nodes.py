"""Which node of how many this is, and who says so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job, detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.job.node_group import NodeGroup
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal
from tests.factories import KUBERNETES, STEP

HAND = {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "r1"}
SAGEMAKER = {
    "SM_HOSTS": '["algo-2","algo-1"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "0", "SM_NUM_CPUS": "4",
    "SM_NETWORK_INTERFACE_NAME": "eth0",
}  # fmt: skip
RANK = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}

# Volcano's pytorch plugin, Vertex AI, PyTorchJob of old operators: a pod each, and no LOCAL_RANK.
POD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-0", "MASTER_PORT": "23456"}
ENDPOINT = {"PET_NNODES": "2", "PET_NODE_RANK": "1"}

CASES = {
    "alone": ({}, NodeGroup()),
    "by hand": (HAND, NodeGroup(2, 1, "r1", source="LAUNCH_NNODES=2")),
    "Kubernetes": (KUBERNETES, NodeGroup(2, 1, "job-master-0", "23456", 4, source="PET_NNODES=2")),
    "Kubernetes with as many ranks as there are GPUs": (
        KUBERNETES | {"PET_NPROC_PER_NODE": "auto"},
        NodeGroup(2, 1, "job-master-0", "23456", source="PET_NNODES=2"),
    ),
    "Kubernetes, one node": ({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, NodeGroup(source="PET_NNODES=1")),
    "a rank that torchrun started there": (KUBERNETES | RANK, NodeGroup()),
    "SageMaker": (
        SAGEMAKER,
        NodeGroup(2, 1, "algo-1", interface="eth0", source='SM_HOSTS=["algo-2","algo-1"]'),
    ),
    "srun, a task a node that is a rank": (STEP, NodeGroup()),
    "srun, a task a node that is to start ranks": (
        STEP | {"LAUNCH_NPROC_PER_NODE": "2"},
        NodeGroup(2, 1, "n1", source="srun"),
    ),
    "srun, a task a node for torchrun": (STEP | {"LAUNCH_LAUNCHER": "torchrun"}, NodeGroup(2, 1, "n1", source="srun")),
    "by hand, as few as one": (
        HAND | {"LAUNCH_NNODES": "1:4"},
        NodeGroup(4, 1, "r1", source="LAUNCH_NNODES=1:4", min_nodes=1),
    ),
    "by hand, a range of one number": (
        HAND | {"LAUNCH_NNODES": "2:2"},
        NodeGroup(2, 1, "r1", source="LAUNCH_NNODES=2:2"),
    ),
    "srun, a task a node that is to start ranks again": (
        STEP | {"LAUNCH_MAX_RESTARTS": "1"},
        NodeGroup(2, 1, "n1", source="srun"),
    ),
    "a pod with its number and no local rank": (POD, NodeGroup(2, 1, "job-0", "23456", source="WORLD_SIZE=2")),
    "a pod that is alone": ({"RANK": "0", "WORLD_SIZE": "1"}, NodeGroup()),
    "a pod that is to train alone": (POD | {"LAUNCH_LAUNCHER": "direct"}, NodeGroup()),
    "processes of one machine without a local rank": (
        POD | {"MASTER_ADDR": "127.0.0.1"},
        NodeGroup(2, 1, "127.0.0.1", "23456", interface="lo", source="WORLD_SIZE=2"),
    ),
    "the first pod of Kubeflow's pytorch-operator": (
        POD | {"RANK": "0", "MASTER_ADDR": "localhost"},
        NodeGroup(2, 0, "localhost", "23456", source="WORLD_SIZE=2"),
    ),
    "a batch script of Slurm that exports them": (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "RANK": "0", "WORLD_SIZE": "4"},
        NodeGroup(),
    ),
    "ranks that the user asked for here": ({"WORLD_SIZE": "2", "LAUNCH_NPROC_PER_NODE": "2"}, NodeGroup()),
    "two that agree": (HAND | KUBERNETES, NodeGroup(2, 1, "r1", nproc_per_node=4, source="LAUNCH_NNODES=2")),
    "ranks per node alone": ({"PET_NPROC_PER_NODE": "3"}, NodeGroup(nproc_per_node=3)),
    "ranks of a node without its rank": (
        {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "3"},
        NodeGroup(nproc_per_node=3),
    ),
    "an IPv6 endpoint": (
        ENDPOINT | {"PET_RDZV_ENDPOINT": "[::1]:29500"},
        NodeGroup(2, 1, "::1", "29500", source="PET_NNODES=2"),
    ),
    "an IPv6 endpoint without a port": (
        ENDPOINT | {"PET_RDZV_ENDPOINT": "[fe80::1]"},
        NodeGroup(2, 1, "fe80::1", source="PET_NNODES=2"),
    ),
    "an endpoint without a port": (
        ENDPOINT | {"PET_RDZV_ENDPOINT": "job-0"},
        NodeGroup(2, 1, "job-0", source="PET_NNODES=2"),
    ),
    "nodes that train alone": (KUBERNETES | {"LAUNCH_LAUNCHER": "direct", "RANK": ""}, NodeGroup()),
    "hosts of SageMaker that train alone": (SAGEMAKER | {"LAUNCH_LAUNCHER": "direct"}, NodeGroup()),
    "nodes and mpirun": (KUBERNETES | {"LAUNCH_LAUNCHER": "mpirun"}, NodeGroup(nproc_per_node=4)),
}


def read(environ: dict[str, str]) -> NodeGroup:
    return detect_node_group(read_launch_settings(environ, {}), environ, detect_job(environ))


@pytest.mark.parametrize("name", CASES)
def test_node_group_comes_from_launcher_or_settings(name: str) -> None:
    environ, nodes = CASES[name]
    assert read(environ) == nodes


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"LAUNCH_NNODES": "2"}, "LAUNCH_NNODES=2: needs MASTER_ADDR"),
        (HAND | {"LAUNCH_NODE_RANK": "2"}, "LAUNCH_NODE_RANK=2: there are LAUNCH_NNODES=2 nodes"),
        ({"LAUNCH_NODE_RANK": "1"}, "LAUNCH_NODE_RANK=1: there are LAUNCH_NNODES=1 nodes"),
        (HAND | {"LAUNCH_NNODES": "4:2"}, "LAUNCH_NNODES=4:2: 4 is more than 2. Write the smaller number first."),
        (HAND | STEP, "LAUNCH_NNODES=2: srun has started this process"),
        (KUBERNETES | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2: PET_NNODES=2 nodes, counted from 0"),
        (KUBERNETES | {"PET_NNODES": "two"}, "PET_NNODES=two: not a number of nodes"),
        (KUBERNETES | {"PET_MASTER_ADDR": ""}, "PET_NNODES=2: needs MASTER_ADDR"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS=algo-1: not a JSON list"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST=algo-3: not among SM_HOSTS"),
        (HAND | KUBERNETES | {"PET_NODE_RANK": "0"}, "LAUNCH_NNODES=2 and PET_NNODES=2 contradict each other: node 1"),
        (KUBERNETES | {"LAUNCH_NNODES": "1"}, "PET_NNODES=2 and LAUNCH_NNODES=1 contradict each other"),
        (POD | {"RANK": "foo"}, "RANK=foo: not a whole number"),
        (POD | {"RANK": "2"}, "RANK=2: WORLD_SIZE=2 nodes, counted from 0"),
        (POD | {"MASTER_ADDR": ""}, "WORLD_SIZE=2: needs MASTER_ADDR"),
        (POD | {"PET_NPROC_PER_NODE": "2"}, "WORLD_SIZE=2: PET_NPROC_PER_NODE=2 is set without PET_NNODES"),
        ({"PET_NPROC_PER_NODE": "abc"}, "PET_NPROC_PER_NODE=abc: not a number of ranks. Set a number"),
        ({"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE=0: not a number of ranks"),
        (KUBERNETES | {"PET_NPROC_PER_NODE": "-1"}, "PET_NPROC_PER_NODE=-1: not a number of ranks"),
        (ENDPOINT | {"PET_RDZV_ENDPOINT": "a:b"}, "PET_RDZV_ENDPOINT=a:b: not a port"),
        (KUBERNETES | {"PET_MASTER_PORT": "b"}, "PET_MASTER_PORT=b: not a port"),
        (
            POD | {"RANK": "0", "MASTER_ADDR": "localhost", "LAUNCH_NPROC_PER_NODE": "2"},
            "WORLD_SIZE=2 and MASTER_ADDR=localhost: .* start LAUNCH_NPROC_PER_NODE=2 ranks here, unset RANK and",
        ),
        (HAND | POD | {"RANK": "0"}, "LAUNCH_NNODES=2 and WORLD_SIZE=2 contradict each other"),
        (HAND | {"LAUNCH_NNODES": "3"} | SAGEMAKER, "LAUNCH_NNODES=3 and SM_HOSTS=.* contradict"),
    ],
)
def test_node_group_contradiction_raises(environ: dict[str, str], said: str) -> None:
    refusal(read, environ, match=said)


CLUSTER = json.dumps({"cluster": {"chief": ["a:1"], "worker": ["b:1"]}, "task": {"type": "worker", "index": 0}})
UNCLAIMED = {
    "a size alone": ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4"),
    "MPI's size alone": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
    "PMI without a local rank": ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "PMI_SIZE=4"),
    "jsrun's size alone": ({"JSM_NAMESPACE_SIZE": "4"}, "JSM_NAMESPACE_SIZE=4"),
    "Flux's size alone": ({"FLUX_JOB_SIZE": "4"}, "FLUX_JOB_SIZE=4"),
    "PMIx alone": ({"PMIX_RANK": "0"}, "PMIX_RANK=0"),
    "ALPS": ({"ALPS_APP_PE": "0"}, "ALPS_APP_PE=0"),
    "the rank of a node alone": ({"NODE_RANK": "1"}, "NODE_RANK=1"),
    "a rank alone": ({"RANK": "1"}, "RANK=1"),
    "a size that is no number": ({"WORLD_SIZE": "many"}, "WORLD_SIZE=many"),
    "PET_NNODES without a rank": ({"PET_NNODES": "2"}, "PET_NNODES=2"),
    "a cluster of another platform": ({"CLUSTER_SPEC": CLUSTER}, "CLUSTER_SPEC .with 2 tasks."),
    "TensorFlow's cluster": ({"TF_CONFIG": CLUSTER}, "TF_CONFIG .with 2 tasks."),
    "Horovod's size": ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}, "HOROVOD_SIZE=2"),
    "a node of AWS Batch": (
        {"AWS_BATCH_JOB_NUM_NODES": "2", "AWS_BATCH_JOB_NODE_INDEX": "0"},
        "AWS_BATCH_JOB_NUM_NODES=2",
    ),
    "pbsdsh": ({"PBS_NODENUM": "0", "PBS_TASKNUM": "2"}, "PBS_TASKNUM=2"),
    "pbsdsh's second node": ({"PBS_NODENUM": "1"}, "PBS_NODENUM=1"),
    "PMI in a batch job": ({"SLURM_JOB_ID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, "PMI_SIZE=2"),
    "PMIx in a batch job": ({"SLURM_JOB_ID": "1", "PMIX_RANK": "1"}, "PMIX_RANK=1"),
    "PMI in a batch job of two nodes": (
        {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "PMI_RANK": "0", "PMI_SIZE": "2"},
        "PMI_SIZE=2",
    ),
    "SageMaker's hosts without its own": ({"SM_HOSTS": SAGEMAKER["SM_HOSTS"]}, "SM_HOSTS=.*"),
    "an engine that nobody knows": ({"ACME_NUM_NODES": "3", "ACME_NODE_INDEX": "0"}, "ACME_NUM_NODES=3"),
    "a platform's own two": ({"NUM_NODES": "2", "NODE_RANK": "0"}, "NUM_NODES=2"),
    "a task of srun without its step's id": ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_PROCID=1"),
    "srun's first task without job and step": (
        {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NPROCS": "2"},
        "SLURM_NPROCS=2",
    ),
    "a node of a step without its id": (
        {"SLURM_JOB_ID": "7", "SLURM_NODEID": "1"},
        "SLURM_NODEID=1",
    ),
    "a batch job whose list of nodes did not get here": ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "2"}, "SLURM_NNODES=2"),
    "a job of LSF without its counts": ({"LSB_JOBID": "7", "LSB_HOSTS": "a a b b"}, "LSB_HOSTS=a a b b"),
    "a job of Grid Engine without its file": ({"JOB_ID": "7", "NHOSTS": "2"}, "NHOSTS=2"),
    "a job of Torque without its file": ({"PBS_JOBID": "7", "PBS_NUM_NODES": "2"}, "PBS_NUM_NODES=2"),
    "a step of srun without task and size": (
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_NODES": "2"},
        "SLURM_STEP_NUM_NODES=2",
    ),
    "a rank of PMI without the size": ({"PMI_RANK": "0"}, "PMI_RANK=0"),
    "a rank without the size": ({"RANK": "0", "MASTER_ADDR": "node1"}, "RANK=0 and MASTER_ADDR=node1"),
    "a rank of Open MPI without the size": ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_RANK=0"),
    "a task of Flux without the size": ({"FLUX_TASK_RANK": "0"}, "FLUX_TASK_RANK=0"),
    "a node of Lightning's": (
        {"NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"},
        "NODE_RANK=0 and MASTER_ADDR=10.0.0.4",
    ),
    "a node without their number": (
        {"LAUNCH_NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"},
        "LAUNCH_NODE_RANK=0 and MASTER_ADDR=10.0.0.4",
    ),
    "a node of Azure ML": (
        {"AZUREML_NODE_COUNT": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"},
        "AZUREML_NODE_COUNT=2",
    ),
    "a replica of Beaker": ({"BEAKER_REPLICA_COUNT": "2", "BEAKER_REPLICA_RANK": "1"}, "BEAKER_REPLICA_COUNT=2"),
    "a worker of Volcano Engine": ({"MLP_WORKER_NUM": "2", "MLP_ROLE_INDEX": "0"}, "MLP_WORKER_NUM=2"),
    "a batch script on one node": ({"SLURM_JOB_ID": "1", "RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
}


@pytest.mark.parametrize("name", UNCLAIMED)
def test_size_or_rank_that_no_launcher_explains_is_refused(name: str) -> None:
    environ, variable = UNCLAIMED[name]
    refusal(read, environ, match=f"^{variable}: (a launcher has several ranks here|this job has other nodes)")
    assert read(environ | {"LAUNCH_LAUNCHER": "direct"}) == NodeGroup()


def test_hosts_of_pbs_without_its_job_are_refused(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\nnode2\n")
    refusal(read, {"PBS_NODEFILE": str(hosts)}, match=f"^PBS_NODEFILE={hosts}: this job has other nodes")


@pytest.mark.parametrize(
    "environ",
    [
        {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"NODE_RANK": "0", "TF_CONFIG": "{}", "CLUSTER_SPEC": "[1]"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "PMIX_RANK": "0"},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
        {"AZUREML_NODE_COUNT": "1", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.4"},
        {"NODE_RANK": "0", "MASTER_ADDR": "localhost"},
        {"SLURM_JOB_ID": "1", "RANK": "1", "LOCAL_RANK": "1", "NODE_RANK": "1"},
        {"PBS_JOBID": "1", "PBS_NODENUM": "0", "PBS_TASKNUM": "1"},
        {"AWS_BATCH_JOB_ID": "1", "AWS_BATCH_JOB_ARRAY_INDEX": "3"},
        {"NUM_WORKERS": "4", "INDEX": "1"},
        {"DSTACK_NODES_NUM": "1", "DSTACK_NODE_RANK": "0"},
        {"SKYPILOT_NUM_NODES": "2"},
        {"SLURM_JOB_ID": "1", "MY_NUM_NODES": "2", "MY_NODE_RANK": "0"},
    ],
)
def test_variables_of_a_single_rank_are_accepted(environ: dict[str, str]) -> None:
    assert read(environ) == NodeGroup()


def test_step_with_several_tasks_per_node_starts_no_ranks() -> None:
    job = replace(detect_job(STEP), local_world_size=2)
    assert not job.starts_ranks_itself(read_launch_settings({"LAUNCH_NPROC_PER_NODE": "2"}, {}).values)
    assert not Job().starts_ranks_itself(read_launch_settings({"LAUNCH_LAUNCHER": "torchrun"}, {}).values)


@pytest.mark.parametrize("variable", ["OAR_NODE_FILE", "OAR_NODEFILE", "COBALT_NODEFILE", "PJM_O_NODEINF"])
def test_batch_job_with_a_file_of_several_nodes_is_refused(tmp_path: Path, variable: str) -> None:
    file = tmp_path / "nodes"
    file.write_text("node1\nnode1\nnode2\n")
    refusal(read, {variable: str(file)}, match=f"^{variable}=.*list them once in LAUNCH_HOSTS")
    file.write_text("node1\nnode1\n")
    assert read({variable: str(file)}) == NodeGroup()
    assert read({variable: str(tmp_path / "none")}) == NodeGroup()
