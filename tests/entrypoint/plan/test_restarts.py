"""What torchrun's agents are asked to do: be alone, or to meet the other nodes' and start ranks again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job, detect_job
from entrypoint.job.detect_nodes import detect_node_group
from entrypoint.plan.inputs import RemoteLauncher
from entrypoint.plan.model import Plan
from entrypoint.plan.planner import make_plan
from entrypoint.settings import read_launch_settings
from tests.conftest import refusal
from tests.factories import KUBERNETES, STEP, make_machine, make_test_plan, plan_inputs, reason_for

HAND = {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "r1"}
# Kubeflow's elastic policy gives pods a range and an endpoint, and no number.
ELASTIC_POD = {
    "PET_NNODES": "1:3", "PET_NPROC_PER_NODE": "2", "PET_RDZV_ENDPOINT": "job-worker-0:29400",
    "HOSTNAME": "job-worker-0",
}  # fmt: skip


def reported(made: Plan) -> dict[str, str]:
    """Return the agent's own options."""
    own = made.command[: made.command.index("--no-python")]
    return dict(word.split("=", 1) for word in own if word.startswith("--") and "=" in word)


def planned(environ: dict[str, str]) -> Plan:
    job = detect_job(environ)
    chosen = read_launch_settings(environ, {})
    if job.starts_ranks_itself(chosen.values):
        nodes = detect_node_group(chosen, environ, job)
        alone = Job(job_id=job.job_id, hostnames=job.hostnames, master_addr=job.master_addr)
        return make_plan(plan_inputs(make_machine(4), environ, alone, node_group=nodes))
    return make_test_plan(make_machine(4), environ, job)


@pytest.mark.parametrize(
    ("environ", "options", "restarts"),
    [
        ({"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_LAUNCHER": "torchrun"}, {"--nnodes": "1"}, 0),
        ({"LAUNCH_MAX_RESTARTS": "2", "LAUNCH_LAUNCHER": "torchrun"}, {"--nnodes": "1"}, 2),
        (HAND | {"LAUNCH_LAUNCHER": "torchrun"}, {"--nnodes": "1"}, 0),
        (HAND | {"LAUNCH_MAX_RESTARTS": "2"}, {"--nnodes": "2:2", "where": "r1:61000"}, 2),
        (HAND | {"LAUNCH_NNODES": "1:4"}, {"--nnodes": "1:4", "where": "r1:61000"}, 3),
        (HAND | {"LAUNCH_NNODES": "2:2", "LAUNCH_LAUNCHER": "torchrun"}, {"--nnodes": "1"}, 0),
        (HAND | {"LAUNCH_NNODES": "1:4", "MASTER_PORT": "29500"}, {"where": "r1:29500"}, 3),
        (ELASTIC_POD, {"--nnodes": "1:3", "where": "job-worker-0:29400", "--nproc-per-node": "2"}, 3),
        (ELASTIC_POD | {"PET_MAX_RESTARTS": "7"}, {"--nnodes": "1:3"}, 7),
        (KUBERNETES | {"PET_NNODES": "2:3"}, {"--nnodes": "2:3", "where": "job-master-0:23456"}, 3),
        (
            STEP | {"LAUNCH_MAX_RESTARTS": "1"},
            {"--nnodes": "2:2", "where": "n1:61956", "--rdzv-id": "42.0"},
            1,
        ),
    ],
)
def test_agents_use_rendezvous_only_for_restarts(
    environ: dict[str, str], options: dict[str, str], restarts: int
) -> None:
    made = planned(environ)
    found = reported(made)
    if made.uses_elastic_rendezvous:
        found["where"] = f"{made.rendezvous.master_addr}:{made.rendezvous.master_port}"
    assert {name: found.get(name) for name in options} == options
    assert found["--max-restarts"] == str(made.nodes.max_restarts) == str(restarts)
    assert made.uses_elastic_rendezvous is ("join_timeout" in found["--rdzv-conf"])
    assert found["--rdzv-conf"].startswith("is_host=0")  # torch's own store would listen for everybody


def test_restarts_have_an_agent_over_several_nodes_alone() -> None:
    made = make_test_plan(make_machine(4), {"LAUNCH_MAX_RESTARTS": "2"})
    assert (made.launcher, made.nodes.max_restarts) == ("local", 2)
    assert (
        reason_for(made, "restarts")
        == "(set by you) LAUNCH_MAX_RESTARTS=2; all ranks restart; not after the codes 2, 3, 75"
    )
    varying = make_test_plan(make_machine(4), HAND | {"LAUNCH_NNODES": "1:4"})
    assert varying.launcher == "torchrun"
    assert reason_for(varying, "restarts").endswith("all ranks restart, on 1 to 4 nodes; not after the codes 2, 3, 75")
    assert next(one.value for one in varying.decisions if one.key == "nodes") == "1:4"


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x1)"},
            "LAUNCH_MAX_RESTARTS=1: srun started the ranks and cannot restart them",
        ),
        ({"LAUNCH_LAUNCHER": "direct"}, "LAUNCH_MAX_RESTARTS=1 and LAUNCH_LAUNCHER=direct contradict"),
        (HAND | {"LAUNCH_LAUNCHER": "local"}, "LAUNCH_MAX_RESTARTS=1 and LAUNCH_LAUNCHER=local contradict"),
    ],
)
def test_restarts_without_agent_raise(environ: dict[str, str], said: str) -> None:
    environ = environ | {"LAUNCH_MAX_RESTARTS": "1"}
    refusal(planned, environ, match=said)


def test_restarts_under_mpirun_and_srun() -> None:
    batch = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "4", "SLURM_TASKS_PER_NODE": "2(x2)"}
    environ = batch | {"LAUNCH_MAX_RESTARTS": "1", "SLURM_CPUS_PER_TASK": "2", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    inputs = plan_inputs(make_machine(4), environ, detect_job(environ))
    refusal(
        make_plan,
        replace(inputs, remote_launcher=RemoteLauncher("/usr/bin/mpirun", "Open MPI")),
        match="LAUNCH_MAX_RESTARTS=1: /usr/bin/mpirun cannot restart ranks",
    )

    from entrypoint.launch.remote import with_remote_command

    asked = replace(inputs, remote_launcher=RemoteLauncher("/usr/bin/srun"))
    command = with_remote_command(make_plan(asked), asked).command
    assert command[:4] == ("/usr/bin/srun", "--nodes=2", "--ntasks=2", "--cpus-per-task=4")
