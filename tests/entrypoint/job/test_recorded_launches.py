"""Recorded environments of real launchers, read as jobs: every rank finds its place, anyone who started it.

`python -m tests.cluster.record` records them again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from entrypoint.job.detect import Job, detect_job

LAUNCHES = json.loads((Path(__file__).parent / "launches.json").read_text())
NAMES = {"hydra": "hydra (MPICH, Intel MPI)", "Open MPI 5": "Open MPI"}
IDS = [f"{one['launch']}, {one['nodes']} x {one['ranks']}" for one in LAUNCHES]


def jobs_of(launch: dict[str, Any]) -> list[Job]:
    return sorted(map(detect_job, launch["environments"]), key=lambda job: job.rank)


@pytest.mark.parametrize("launch", LAUNCHES, ids=IDS)
def test_recorded_launch_gives_every_rank(launch: dict[str, Any]) -> None:
    found, total = jobs_of(launch), launch["nodes"] * launch["ranks"]
    name = launch["launch"].partition(" in an")[0].partition(" --")[0].partition(",")[0]
    assert {job.launcher for job in found} == {NAMES.get(name, name)}
    assert [job.rank for job in found] == list(range(total))
    assert {job.world_size for job in found} == {total}
    assert [job.local_rank for job in found] == [*range(launch["ranks"])] * launch["nodes"]
    assert {job.local_world_size for job in found} == {launch["ranks"]}
    assert {job.on_one_node for job in found} == {launch["nodes"] == 1}


@pytest.mark.parametrize("launch", [one for one in LAUNCHES if one["nodes"] > 1 and one["launch"] != "hydra"])
def test_master_addr_follows_from_the_launchers_variables(launch: dict[str, Any]) -> None:
    masters = {job.master_addr for job in jobs_of(launch)}
    assert len(masters) == 1
    assert masters <= {"node1", "10.78.0.1"}


@pytest.mark.parametrize("launch", LAUNCHES, ids=IDS)
def test_ranks_of_one_job_agree_on_its_id(launch: dict[str, Any]) -> None:
    assert len({job.job_id for job in jobs_of(launch)}) == 1
