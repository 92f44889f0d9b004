"""What each rank is given before its program starts."""

from __future__ import annotations

import subprocess

import pytest
from msgspec.structs import replace

from entrypoint.core.errors import ExitCode
from entrypoint.job.detect import Job
from entrypoint.plan.model import PLAN_VAR, BindingPlan, Program
from entrypoint.rank.environment import TORCHRUN_VARIABLES, build_rank_environment, global_rank_of, master_port
from tests.conftest import PYTHON, refusal
from tests.factories import SCRIPT, make_machine, make_test_plan

HYDRA = "hydra (MPICH, Intel MPI)"


def environment(job: Job, environ: dict[str, str] | None = None) -> dict[str, str]:
    made = make_test_plan(make_machine(4), environ, job)
    return build_rank_environment(made, made.ranks[job.local_rank], job, environ or {})


def test_build_rank_environment_single_rank_has_master() -> None:
    found = environment(Job())
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", "1", "0", "1")
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(found["MASTER_PORT"]) < 65536


def test_build_rank_environment_mpi_rank_has_torch_variables() -> None:
    found = environment(Job("Open MPI", 1, 2, 1, 2, "9000"))
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert found["MASTER_PORT"] == str(61000 + 9000 % 2200)


@pytest.mark.parametrize("job_id", ["17", "9123456", "some-name", ""])
def test_master_port_is_equal_on_every_rank(job_id: str) -> None:
    ports = {master_port(Job("srun", rank, 4, rank, 4, job_id)) for rank in range(4)}
    assert len(ports) == 1
    assert 61000 <= ports.pop() < 63200


def test_build_rank_environment_keeps_user_variables() -> None:
    mine = {"MASTER_PORT": "1234", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/mine"}
    found = environment(Job(), mine)
    assert {name: found[name] for name in mine} == mine


@pytest.mark.parametrize(
    ("job", "environ", "run_id"),
    [
        (Job(), {}, "none"),
        (Job("Open MPI", 1, 2, 1, 2, "9000"), {}, "9000"),
        (Job("torchrun", 1, 2, 1, 2, "7"), {"TORCHELASTIC_RUN_ID": "7"}, "7"),
        (Job("srun", 1, 2, 1, 2, "9000"), {}, None),
    ],
)
def test_build_rank_environment_sets_run_id_for_lightning(
    job: Job, environ: dict[str, str], run_id: str | None
) -> None:
    assert environment(job, environ).get("TORCHELASTIC_RUN_ID") == run_id


def test_require_master_addr_missing_raises() -> None:
    refusal(
        environment,
        Job(HYDRA, 0, 4, 0, 2),
        match=r"MASTER_ADDR is not set: hydra .* started ranks on several .* -genv",
        code=ExitCode.RENDEZVOUS,
    )
    assert environment(Job(HYDRA, 0, 4, 0, 2), {"MASTER_ADDR": "r1"})["MASTER_ADDR"] == "r1"


def test_master_addr_comes_from_launcher() -> None:
    found = environment(Job("srun", 2, 4, 0, 2, "9000", hostnames=("n1", "n2"), master_addr="n1"))
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n1", str(61000 + 9000 % 2200))


def test_global_rank_of_agent_rank_counts_all_nodes() -> None:
    environ = {
        "LAUNCH_NNODES": "3", "LAUNCH_NODE_RANK": "2", "LAUNCH_NPROC_PER_NODE": "2",
        "MASTER_ADDR": "r1",
    }  # fmt: skip
    made = make_test_plan(make_machine(4), environ)
    agents = Job("torchrun", rank=1, world_size=2, local_rank=1, local_world_size=2, job_id="agent's own")
    job = global_rank_of(made, agents)
    assert (job.rank, job.world_size, job.local_rank, job.local_world_size) == (5, 6, 1, 2)
    found = build_rank_environment(
        made, made.ranks[1], job, environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    )
    assert (found["RANK"], found["WORLD_SIZE"], found["GROUP_RANK"]) == ("5", "6", "2")
    assert found["MASTER_ADDR"] == "r1", "the user's, not the agent's"
    assert found["MASTER_PORT"] == str(master_port(global_rank_of(made, Job("torchrun", 0, 2, 0, 2)))), (
        "as all work it out"
    )


def test_rank_start_imports_no_settings() -> None:
    made = replace(
        make_test_plan(make_machine(4)), binding=BindingPlan(cpu_binding="none"), program=Program("run", ("/bin/true",))
    )
    done = subprocess.run(
        [PYTHON, "-X", "importtime", "-m", "entrypoint", "rank"],
        env={PLAN_VAR: made.to_json()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "entrypoint.rank.bootstrap" in done.stderr
    assert "entrypoint.settings" not in done.stderr
    assert "argparse" not in done.stderr


def test_build_rank_environment_without_rank_variables() -> None:
    mine = {"LAUNCH_ENV": "none", "RANK": "1", "WORLD_SIZE": "2", "LAUNCH_LAUNCHER": "direct", "MASTER_ADDR": "there"}
    found = environment(Job(), mine)
    assert not TORCHRUN_VARIABLES & set(found)
    assert found["OMP_NUM_THREADS"] == "4"


@pytest.mark.parametrize(
    ("environ", "program", "said"),
    [
        ({"LAUNCH_NPROC_PER_NODE": "2"}, SCRIPT, "LAUNCH_ENV=none: 2 ranks find each other by RANK"),
        ({}, Program("train", ("python", "-m", "train")), "LAUNCH_ENV=none: is for a script of your own"),
    ],
)
def test_ranks_that_need_their_variables_cannot_go_without(
    environ: dict[str, str], program: Program, said: str
) -> None:
    refusal(make_test_plan, make_machine(4), environ | {"LAUNCH_ENV": "none"}, program=program, match=said)
