"""The batch script of Grid Engine in a real one: Open MPI's daemons by qrsh and by ssh, requeueing, qdel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cluster.batch_scripts import FILES, LONG, SHORT, output, wait_for
from tests.cluster.batch_scripts import installed as installed
from tests.cluster.conftest import ENTRYPOINT, GridEngine, in_all
from tests.conftest import script

pytestmark = pytest.mark.cluster
FILE = FILES / "grid-engine/train.sge"
SLOTS = ("-pe", "mpi", "2")  # one on each node: the parallel environment fills nodes in turn
# Without these, which have it use ssh, Open MPI chooses qrsh by itself, as on a site.
SSH = ("OMPI_MCA_plm_rsh_agent", "PRTE_MCA_plm_ssh_agent")
BY_QRSH = pytest.param(SSH, "qrsh", id="qrsh")
BY_SSH = pytest.param((), "ssh", id="ssh", marks=in_all)
# Shows what mpirun starts its daemons by.
VERBOSE = {"OMPI_MCA_plm_base_verbose": "5"}


def losses_of_one_process(grid_engine: GridEngine) -> list[float]:
    """Train as one process of the same batch size, and return its losses."""
    cluster = grid_engine.cluster
    env = SHORT | {"TRAIN_RUN_NAME": "one", "LAUNCH_NPROC_PER_NODE": "1"}
    done = cluster.run("node1", *ENTRYPOINT, "train", env=env)
    assert done.code == 0, done.out
    return cluster.losses("one")


@pytest.mark.parametrize(("without", "way"), [BY_QRSH, BY_SSH])
def test_job_trains_on_two_nodes(
    grid_engine: GridEngine, installed: dict[str, str], without: tuple[str, ...], way: str
) -> None:
    job = grid_engine.submit(FILE, *SLOTS, env=SHORT | installed | VERBOSE, without=without)
    record, text = grid_engine.ended(job), output(grid_engine.cluster, job)
    assert (record["exit_status"], record["slots"]) == ("0", "2"), text[-3000:]
    started_by = re.search(r"plm:rsh: final template argv:\s+(\S+)", text)
    assert started_by, text[-3000:]
    assert way in Path(started_by[1]).name
    assert grid_engine.cluster.summary("job")["world_size"] == 2
    assert "Grid Engine grants 1 CPUs" in (grid_engine.cluster.folder / "runs/job/plan.json").read_text()
    assert grid_engine.cluster.losses("job") == pytest.approx(losses_of_one_process(grid_engine), rel=1e-3)


@in_all
def test_open_mpi_5_starts_its_daemons_by_qrsh(grid_engine: GridEngine, installed: dict[str, str]) -> None:
    cluster = grid_engine.cluster
    path = f"{cluster.mpi('Open MPI 5')['PATH'].split(':')[0]}:{installed['PATH']}"
    job = grid_engine.submit(FILE, *SLOTS, env=SHORT | {"PATH": path, "PRTE_MCA_plm_base_verbose": "5"}, without=SSH)
    record, text = grid_engine.ended(job), output(cluster, job)
    assert record["exit_status"] == "0", text[-3000:]
    assert re.search(r'plm:ssh: using "\S*/qrsh -inherit', text), text[:3000]
    assert cluster.summary("job")["world_size"] == 2


def test_job_is_queued_again_before_its_end_and_resumes(grid_engine: GridEngine, installed: dict[str, str]) -> None:
    cluster = grid_engine.cluster
    job = grid_engine.submit(FILE, *SLOTS, env=LONG | installed | {"MINUTES": "0.1"}, without=SSH)
    wait_for(cluster, job, f"preempted: job {job} goes back into the queue")
    wait_for(cluster, job, "resuming from runs/job/checkpoint/step-", 120)
    text = output(cluster, job)
    steps = [int(step) for step in re.findall(r"step[ -]0*(\d+)(?: is saved|,)", text)]
    assert steps[0] == steps[1], text[-3000:]
    grid_engine.run("qdel", job)


@pytest.mark.parametrize("without", [SSH, pytest.param((), marks=in_all)], ids=["qrsh", "ssh"])
def test_deleted_job_leaves_no_process(
    grid_engine: GridEngine, installed: dict[str, str], without: tuple[str, ...]
) -> None:
    cluster = grid_engine.cluster
    job = grid_engine.submit(FILE, *SLOTS, env=LONG | installed, without=without)
    wait_for(cluster, job, "epoch 2/")
    assert set(cluster.left()) == {"node1", "node2"}
    assert grid_engine.run("qdel", job).code == 0
    cluster.gone(30)
    assert grid_engine.ended(job)["failed"].startswith("100"), "qacct: assumedly after job"
    assert not [pid for node in ("node1", "node2") for pid in cluster.pids(node, "orted")]


# Stands in for Apptainer with an image that has no Grid Engine: hides its programs and runs the installed entrypoint.
APPTAINER = """\
#!/bin/sh
echo "apptainer $*"
exec unshare --mount sh -c 'mount -t tmpfs none "$SGE_ROOT"; shift 5; exec entrypoint "$@"' _ "$@"
"""


def test_job_of_an_image_reaches_other_nodes_by_ssh(grid_engine: GridEngine, installed: dict[str, str]) -> None:
    folder = Path(installed["PATH"].split(":")[0])
    script(folder, "apptainer", APPTAINER).chmod(0o755)
    ssh = f'#!/bin/sh\necho "by ssh" >&2\nexec /usr/bin/ssh -F {grid_engine.cluster.ssh} "$@"\n'
    script(folder, "ssh", ssh).chmod(0o755)
    job = grid_engine.submit(FILE, *SLOTS, env=SHORT | installed | {"IMAGE": "x.sif"}, without=SSH)
    record, text = grid_engine.ended(job), output(grid_engine.cluster, job)
    assert record["exit_status"] == "0", text[-3000:]
    assert "by ssh" in text
    assert grid_engine.cluster.summary("job")["world_size"] == 2
