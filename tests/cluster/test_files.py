"""What a user submits, as it stands in cluster/: trains, saves before the end, is requeued and goes on.

Grid Engine's script runs in a real one: Open MPI's daemons by qrsh and by ssh, requeueing, qdel.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.batch_scripts import FILES, LONG, SHORT, installed as installed, output, wait_for
from tests.cluster.conftest import ENTRYPOINT, Cluster, GridEngine, Slurm, in_all
from tests.conftest import script

pytestmark = pytest.mark.cluster


@pytest.fixture
def contained(cluster: Cluster, installed: dict[str, str]) -> Iterator[dict[str, str]]:
    """What the files in cluster/ need to take the image: Apptainer, the SIF, a folder that its user may write to."""
    tool, sifs, work = (os.environ.get(f"APPTAINER{part}", "") for part in ("", "_SIFS", "_WORK"))
    if not tool or not Path(work, "cpu-intel.sif").is_file():
        pytest.skip("needs Apptainer and cpu-intel.sif: set APPTAINER, APPTAINER_SIFS, APPTAINER_WORK")
    folder = Path(installed["PATH"].split(":")[0])
    # A second apart: starts of Apptainer in its own root, as CI has it, get into each other's way.
    lock = f"(flock 9; sleep 1) 9>{folder}/lock"
    script(folder, "apptainer", f'#!/bin/sh\n{lock}\nexec {tool} "$@"\n').chmod(0o755)
    runs = Path(tempfile.mkdtemp(prefix="runs-", dir=work))
    runs.chmod(0o777)
    # Apptainer binds the host's own, which is not the node's here.
    (runs / "hosts").write_text(cluster.run("node1", "cat", "/etc/hosts").out)
    inside = f"{sifs}/{runs.name}"
    bound = ",".join(filter(None, (os.environ.get("APPTAINER_BIND"), f"{inside}/hosts:/etc/hosts")))
    more = {"IMAGE": f"{sifs}/cpu-intel.sif", "TRAIN_OUTPUT_DIR": inside, "APPTAINER_BIND": bound}
    yield installed | more | {"RUNS": str(runs)}
    shutil.rmtree(runs)


@pytest.mark.slurm
@pytest.mark.parametrize("file", ["train.sbatch", "train-mpi.sbatch"])
def test_batch_script_trains_on_two_nodes(slurm: Slurm, installed: dict[str, str], file: str) -> None:
    job = slurm.submit(FILES / "slurm" / file, env=SHORT | installed)
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(slurm.cluster, job)
    assert slurm.cluster.summary("job")["world_size"] == 2


@pytest.mark.slurm
@pytest.mark.apptainer
@pytest.mark.parametrize("file", ["train.sbatch", pytest.param("train-mpi.sbatch", marks=in_all)])
def test_batch_script_trains_in_image(slurm: Slurm, contained: dict[str, str], file: str) -> None:
    job = slurm.submit(FILES / "slurm" / file, env=SHORT | contained)
    state = slurm.ended(job)
    assert (state["JobState"], state["ExitCode"]) == ("COMPLETED", "0:0"), output(slurm.cluster, job)
    check_run_in_the_image(contained)


@pytest.mark.apptainer
def test_hostfile_trains_in_image(cluster: Cluster, contained: dict[str, str]) -> None:
    cluster.run("node1", FILES / "mpi/train.sh", env=SHORT | contained).succeeded()
    check_run_in_the_image(contained)


@in_all
@pytest.mark.apptainer
def test_image_starts_remote_ranks_in_the_same_image(cluster: Cluster, contained: dict[str, str]) -> None:
    runs, inside = Path(contained["RUNS"]), contained["TRAIN_OUTPUT_DIR"]
    keys = Path(cluster.ssh).parent
    config = Path(cluster.ssh).read_text().replace(f"{keys}/id", f"{inside}/id")
    script(runs, "config", config)
    # What a login on the other node gives a user: Apptainer on PATH, and the same settings.
    there = f"PATH={contained['PATH'].split(':')[0]}:\\$PATH APPTAINER_BIND={contained['APPTAINER_BIND']}"
    reach = f'#!/bin/sh\nhost=$1\nshift\nexec ssh -F {inside}/config "$host" "export {there}; $*"\n'
    script(runs, "reach", reach).chmod(0o755)
    (runs / "id").write_text((keys / "id").read_text())
    (runs / "id").chmod(0o600)
    for file in (runs / "id", runs / "config", runs):
        os.chown(file, 1000, 1000)  # the user that CI's Apptainer runs as
    env = SHORT | contained | {"OMPI_MCA_plm_rsh_agent": f"{inside}/reach"}
    words = ("apptainer", "exec", contained["IMAGE"], "entrypoint", "train", "--hosts=node1:1,node2:1")
    cluster.run("node1", "env", "-C", runs, *words, env=env).succeeded()
    check_run_in_the_image(contained)


def check_run_in_the_image(contained: dict[str, str]) -> None:
    run = Path(contained["RUNS"], "job")
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    assert [rank["rank"] for rank in json.loads((run / "ranks.json").read_text())] == [0, 1]


def test_hostfile_trains_without_scheduler(cluster: Cluster, installed: dict[str, str]) -> None:
    cluster.run("node1", FILES / "mpi/train.sh", env=SHORT | installed | {"HOSTS": "node1:2,node2:1"}).succeeded()
    assert cluster.summary("job")["world_size"] == 3


@pytest.mark.slurm
@pytest.mark.parametrize(("file", "warn"), [("train.sbatch", ()), ("train-mpi.sbatch", ("--batch",))])
def test_preemption_warning_saves_requeues_and_resumes(
    slurm: Slurm, installed: dict[str, str], file: str, warn: tuple[str, ...]
) -> None:
    job = slurm.submit(FILES / "slurm" / file, env=LONG | installed)
    wait_for(slurm.cluster, job, "epoch 3/")
    slurm.run("scancel", "--signal=USR1", *warn, job)  # what --signal=USR1@120 sends, whom it sends it to
    wait_for(slurm.cluster, job, "preempted: stopped by SIGUSR1: step ")
    wait_for(slurm.cluster, job, "goes back into the queue")
    wait_for(slurm.cluster, job, "resuming from runs/job/checkpoint/step-")
    assert slurm.state(job)["Restarts"] == "1"
    saved, on = (int(step) for step in re.findall(r"step[ -]0*(\d+)(?: is saved|,)", output(slurm.cluster, job))[:2])
    assert saved == on, "nothing is done twice"
    slurm.run("scancel", job)


@pytest.mark.slurm
def test_scancel_saves_and_resubmitted_job_resumes(slurm: Slurm, installed: dict[str, str]) -> None:
    job = slurm.submit(FILES / "slurm/train.sbatch", env=LONG | installed)
    wait_for(slurm.cluster, job, "epoch 3/")
    slurm.run("scancel", job)
    assert slurm.ended(job)["JobState"] == "CANCELLED"
    assert sorted((slurm.cluster.folder / "runs/job/checkpoint").glob("step-*"))
    slurm.cluster.gone(20)
    again = slurm.submit(FILES / "slurm/train.sbatch", env=LONG | installed)
    wait_for(slurm.cluster, again, "resuming from runs/job/checkpoint/step-")
    slurm.run("scancel", again)


def test_mpirun_ended_by_a_signal_saves(cluster: Cluster, installed: dict[str, str]) -> None:
    one = cluster.start("node1", FILES / "mpi/train.sh", env=LONG | installed)
    one.wait_for("epoch 3/")
    cluster.signal("node1", "mpirun --bind-to", signal.SIGUSR1)
    assert one.code(30) == 75, one.text()[-3000:]
    assert "preempted: stopped by SIGUSR1" in one.text()
    cluster.gone(10)


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
    cluster.run("node1", *ENTRYPOINT, "train", env=env).succeeded()
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
