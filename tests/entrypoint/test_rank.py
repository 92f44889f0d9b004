"""What each rank is given before its program starts."""

from __future__ import annotations

import pytest

from entrypoint.errors import Exit, Refused
from entrypoint.job import Job
from entrypoint.plan import VARIABLE, Plan
from entrypoint.rank import master_port, rank_environment
from tests.entrypoint.test_planner import machine, plan


def environment(job: Job, environ: dict[str, str] | None = None) -> dict[str, str]:
    made = plan(machine(4), environ, job)
    return rank_environment(made, made.ranks[job.local_rank], job, environ or {})


def test_a_lone_rank_can_be_met_by_env_rendezvous() -> None:
    found = environment(Job())
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("0", "1", "0", "1")
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert 1024 < int(found["MASTER_PORT"]) < 65536


def test_an_mpi_rank_gets_torchs_variables() -> None:
    found = environment(Job("Open MPI", 1, 2, 1, 2, "9000"))
    assert (found["RANK"], found["WORLD_SIZE"], found["LOCAL_RANK"]) == ("1", "2", "1")
    assert found["MASTER_PORT"] == str(61000 + 9000 % 4000)


@pytest.mark.parametrize("job_id", ["17", "9123456", "some-name", ""])
def test_every_rank_works_out_the_same_port(job_id: str) -> None:
    ports = {master_port(Job("srun", rank, 4, rank, 4, job_id)) for rank in range(4)}
    assert len(ports) == 1
    assert 61000 <= ports.pop() < 65000


def test_what_a_person_has_set_is_kept() -> None:
    mine = {"MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "1234", "OMP_NUM_THREADS": "3", "PYTHONPATH": "/mine"}
    found = environment(Job(), mine)
    assert {name: found[name] for name in mine} == mine


def test_ranks_on_several_nodes_need_a_master() -> None:
    with pytest.raises(Refused, match="MASTER_ADDR is not set: srun started ranks on several nodes") as error:
        environment(Job("srun", 0, 4, 0, 2, "1"))
    assert error.value.code == Exit.RENDEZVOUS


def test_the_plan_travels_to_the_program() -> None:
    found = environment(Job())
    assert Plan.from_variable(found[VARIABLE]) == plan(machine(4))
