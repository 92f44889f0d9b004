"""The batch scripts of PBS, LSF, Grid Engine and Flux, by stand-ins that set the documented variables.

A real Grid Engine runs its script in `test_files.py`.
The nodes, ssh, and Open MPI's mpirun are real. HPE's mpiexec, jsrun and flux are `stand_in_launcher.py`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.batch_scripts import FILES, LONG, SHORT, installed as installed
from tests.cluster.conftest import Cluster, main_ones
from tests.conftest import script

pytestmark = pytest.mark.cluster
STAND_IN = Path(__file__).with_name("stand_in_launcher.py")


@dataclass(frozen=True)
class Batch:
    """A batch script, its scheduler's variables, and the commands that stand in for the site's own."""

    file: str
    environ: dict[str, str]
    host_file: tuple[str, str] = ("", "")
    launcher: tuple[str, str] = ("", "")
    requeue: str = ""
    ended: int = 75


PBS = {"PBS_JOBID": "7.server", "PBS_ENVIRONMENT": "PBS_BATCH", "NCPUS": "2", "OMP_NUM_THREADS": "2"}
LSF = {"LSB_JOBID": "7", "LSB_HOSTS": "node1 node2", "LSB_MCPU_HOSTS": "node1 1 node2 1 "}
BATCHES = {
    "OpenPBS": Batch("pbs/train.pbs", PBS, ("PBS_NODEFILE", "node1\nnode2\n"), requeue="qrerun"),
    "PBS with PALS": Batch("pbs/train.pbs", PBS, ("PBS_NODEFILE", "node1\nnode2\n"), ("mpiexec", "PALS"), "qrerun"),
    "Torque": Batch(
        "pbs/train.pbs",
        {"PBS_JOBID": "7.server", "PBS_NUM_PPN": "1", "PBS_NUM_NODES": "2"},
        ("PBS_NODEFILE", "node1\nnode2\n"),
        requeue="qrerun",
    ),
    "LSF": Batch("lsf/train.lsf", LSF, requeue="brequeue"),
    "LSF with jsrun": Batch("lsf/train.lsf", LSF, launcher=("jsrun", "jsrun"), requeue="brequeue"),
    "Grid Engine": Batch(
        "grid-engine/train.sge",
        {"JOB_ID": "7", "NSLOTS": "2", "NHOSTS": "2", "PE": "mpi"},
        ("PE_HOSTFILE", "node1 1 all.q@node1 UNDEFINED\nnode2 1 all.q@node2 UNDEFINED\n"),
        ended=99,
    ),
    "Flux": Batch("flux/train.sh", {"FLUX_URI": "local:///run/flux/local"}, launcher=("flux", "Flux")),
}


def environment(cluster: Cluster, installed: dict[str, str], batch: Batch) -> dict[str, str]:
    """Return what the scheduler's daemon gives the batch script on the first node."""
    folder = Path(installed["PATH"].split(":")[0])
    more = {"SSH_CONFIG": cluster.ssh, "STAND_IN_HOSTS": "node1,node2", "FLAGS": "--batch-size 256"}
    more |= {"PBS_O_WORKDIR": str(cluster.folder), "LS_SUBCWD": str(cluster.folder)}
    name, kind = batch.launcher
    if name == "flux":  # flux getattr jobid; flux run …
        run = f'shift; exec {sys.executable} {STAND_IN} Flux "$@"'
        script(folder, name, f"#!/bin/bash\nif [[ $1 == getattr ]]; then echo f1; else {run}; fi\n").chmod(0o755)
    elif name:
        script(folder, name, f'#!/bin/sh\nexec {sys.executable} {STAND_IN} {kind} "$@"\n').chmod(0o755)
    if batch.requeue:
        script(folder, batch.requeue, f'#!/bin/sh\necho "{batch.requeue} $1" >requeued\n').chmod(0o755)
    variable, hosts = batch.host_file
    if variable:
        more[variable] = str(script(cluster.folder, "hosts", hosts))
    return installed | batch.environ | more


@pytest.mark.parametrize("name", main_ones(BATCHES, "OpenPBS", "LSF with jsrun"))
def test_batch_script_trains_on_all_hosts(cluster: Cluster, installed: dict[str, str], name: str) -> None:
    batch = BATCHES[name]
    cluster.run("node1", "bash", FILES / batch.file, env=SHORT | environment(cluster, installed, batch)).succeeded()
    summary = cluster.summary("job")
    assert (summary["world_size"], summary["epochs"]) == (2, 2)
    assert not (cluster.folder / "requeued").exists()


@pytest.mark.parametrize("name", main_ones(BATCHES, "PBS with PALS", "Grid Engine"))
def test_batch_script_queues_again_before_its_end(cluster: Cluster, installed: dict[str, str], name: str) -> None:
    batch = BATCHES[name]
    environ = LONG | environment(cluster, installed, batch) | {"MINUTES": "0.1"}
    done = cluster.run("node1", "bash", FILES / batch.file, env=environ)
    assert done.code == batch.ended, done.out[-3000:]
    assert "preempted: " in done.out
    if batch.requeue:
        requeued = (cluster.folder / "requeued").read_text().split()
        assert requeued == [batch.requeue, batch.environ.get("PBS_JOBID") or batch.environ["LSB_JOBID"]]
    assert list((cluster.folder / "runs/job").glob("checkpoint*"))
