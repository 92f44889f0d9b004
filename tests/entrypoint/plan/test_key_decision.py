"""Which key the monitors of a job over several nodes have in common."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from entrypoint.job.detect import Job
from entrypoint.job.job_key import KeySource
from entrypoint.plan.inputs import RemoteLauncher
from entrypoint.plan.model import Plan
from tests.factories import make_machine, make_test_plan, reason_for

BY_HAND = {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "node1"}
SRUN = Job(launcher="srun", rank=1, world_size=4, local_rank=1, local_world_size=2, hostnames=("node1", "node2"))


def plan_of(environ: dict[str, str], job: Job, source: KeySource, remote: RemoteLauncher | None = None) -> Plan:
    return make_test_plan(make_machine(4), environ, job, key_source=source, remote_launcher=remote)


DRAWN = KeySource("drawn", "/home/me/.cache/reference-training/keys/7")
MPIRUN = RemoteLauncher("/usr/bin/mpirun", "Open MPI", (("node1", 2), ("node2", 2)))


@pytest.mark.parametrize(
    ("environ", "job", "source", "remote", "kind", "reason"),
    [
        (BY_HAND, Job(), KeySource(), None, "none", "any host can join the job. Set LAUNCH_SECRET_FILE"),
        ({}, SRUN, KeySource(), None, "none", "any host can join the job. Set LAUNCH_SECRET_FILE"),
        ({}, SRUN, DRAWN, None, "drawn", "rank 0 writes it to /home/me/.cache/reference-training/keys/7; hosts"),
        ({}, SRUN, KeySource("variable"), None, "variable", "hosts without it cannot join"),
        (
            BY_HAND | {"LAUNCH_SECRET_FILE": "key"},
            Job(),
            KeySource("file", "key"),
            None,
            "file",
            "(set by you) LAUNCH_SECRET_FILE=key",
        ),
        ({"TORCHELASTIC_USE_AGENT_STORE": "True"}, SRUN, KeySource(), None, "none", "'s own store accepts any host"),
        ({}, Job(), KeySource(), MPIRUN, "drawn here", "this process draws it; hosts without it cannot join"),
        ({}, Job(), KeySource("variable"), MPIRUN, "variable", "hosts without it cannot join"),
    ],
)
def test_source_of_the_key_is_in_the_plan(
    environ: dict[str, str], job: Job, source: KeySource, remote: RemoteLauncher | None, kind: str, reason: str
) -> None:
    plan = plan_of(environ, job, source, remote)
    assert plan.rendezvous.key_source == kind
    assert reason in reason_for(plan, "job key")
    assert plan.warnings == ()


@pytest.mark.parametrize("job", [Job(), replace(SRUN, world_size=2)])
def test_job_of_one_node_needs_no_key(job: Job) -> None:
    plan = plan_of({}, job, DRAWN)
    assert plan.rendezvous.key_source == "none"
    assert all(decision.key != "job key" for decision in plan.decisions)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("LAUNCH_SECRET_FILE=key", "the job has one node"),
        ("LAUNCH_COLLECTIVE_TIMEOUT_S=9", "on one node a script sets its own limits"),
    ],
)
def test_setting_without_effect_on_one_node_is_named(setting: str, why: str) -> None:
    plan = make_test_plan(make_machine(4), dict([setting.split("=")]))
    assert plan.warnings == (f"{setting} has no effect: {why}",)
