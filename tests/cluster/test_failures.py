"""What goes wrong between nodes, caused for real: the whole job ends soon, nothing is left, the cause is named."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.cluster.conftest import ALL, ENTRYPOINT, Cluster, Slurm, Started, in_all
from tests.conftest import script

pytestmark = pytest.mark.cluster

TIMEOUT_S = 10
LONG = {"TRAIN_EPOCHS": "100000", "TRAIN_RUN_NAME": "long", "LAUNCH_COLLECTIVE_TIMEOUT_S": str(TIMEOUT_S)}
RANK = "--module train"  # on the command line of every rank


def agents(cluster: Cluster) -> list[Started]:
    return cluster.agents("train", env=LONG)


def mpirun(which: str) -> Callable[[Cluster], list[Started]]:
    def start(cluster: Cluster) -> list[Started]:
        hosts = "--hosts=node1:1,node2:1"
        return [cluster.start("node1", *ENTRYPOINT, "train", hosts, env=LONG | cluster.mpi(which))]

    return start


@dataclass(frozen=True)
class Way:
    """A way to start the job, and what to look for on the command line of its launcher on the first node."""

    start: Callable[[Cluster], list[Started]]
    launcher: str


WAYS = {
    "agents": Way(agents, "ep-agent"),
    "Open MPI": Way(mpirun("Open MPI"), "--bind-to none"),
    "hydra": Way(mpirun("hydra"), "mpiexec.hydra"),
}


def kill_rank(cluster: Cluster, _: Way) -> None:
    assert cluster.signal("node2", RANK, signal.SIGKILL) == 1


def kill_launcher(cluster: Cluster, way: Way) -> None:
    assert cluster.signal("node1", way.launcher, signal.SIGKILL) >= 1


def stop_rank(cluster: Cluster, _: Way) -> None:
    assert cluster.signal("node2", RANK, signal.SIGSTOP) == 1


def power_off(cluster: Cluster, _: Way) -> None:
    cluster.do("kill", "node2")
    cluster.count = 1


def cut(cluster: Cluster, _: Way) -> None:
    cluster.do("cut", "node2")


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, how soon all is to be over, and what is to be said by whom is left."""

    cause: Callable[[Cluster, Way], None]
    limit_s: float
    said: str


FAULTS = {
    "a rank is killed": Fault(kill_rank, 10, r"rank 1 on node2 failed first: killed by SIGKILL"),
    "the launcher is killed": Fault(kill_launcher, 15, ""),
    "a rank is stopped": Fault(stop_rank, TIMEOUT_S + 40, r"rank 0: lost (another rank|rank 1 on node2)"),
    "a node is powered off": Fault(power_off, TIMEOUT_S + 40, r"lost rank 1 on node2 \(|Connection to node2 closed"),
    "a node is cut off": Fault(cut, TIMEOUT_S + 40, r"rank 0: lost rank 1 on node2 \("),
}


def over(cluster: Cluster, started: list[Started], fault: Fault, began: float, *, own_code: int = 5) -> None:
    """Check that all ended in time, unsuccessfully, with nothing left, and that the cause was named.

    `own_code` is another code that the launcher may end with.
    """
    codes = [one.code(fault.limit_s + 5) for one in started]
    cluster.gone(max(1.0, fault.limit_s - (time.monotonic() - began)))
    took_s = time.monotonic() - began
    text = "\n".join(one.text() for one in started)
    print(f"over after {took_s:.1f} s with {codes}")
    assert took_s <= fault.limit_s
    # Of what was killed there is no code; ranks whose launcher is gone are asked to end, and save.
    allowed = {kill_launcher: {5, 75, -9}, power_off: {5, -9}}.get(fault.cause, {5})
    assert set(codes) <= allowed | {own_code}, text[-3000:]
    assert re.search(fault.said, text), text[-3000:]
    assert "Traceback" not in text


# Rank 0 loses its connection, and so fails as well.
FAILS = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if os.environ["RANK"] == "1":
    os._exit(7)
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize("which", ["hydra", "Intel MPI"])
def test_failed_rank_names_itself_where_hydra_kills_rank_0(cluster: Cluster, which: str) -> None:
    script(cluster.folder, "x.py", FAILS)
    ssh = {"I_MPI_HYDRA_BOOTSTRAP_EXEC": "ssh", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": f"-F {cluster.ssh}"}
    words = ("mpirun", "-genv", "MASTER_ADDR", "node1", "-n", "2", "-ppn", "1", "-hosts", "node1,node2")
    result = cluster.run("node1", *words, *ENTRYPOINT, "run", "x.py", env=cluster.mpi(which) | ssh)
    assert result.code != 0
    assert result.out.count("entrypoint: error: rank 1 on node2 failed first: exit code 7") == 1, result.out


def test_last_line_names_the_first_of_two_failures(cluster: Cluster) -> None:
    started = cluster.agents("run", script(cluster.folder, "x.py", FAILS))
    assert [one.code(60) for one in started] == [1, 7]
    last = started[0].text().splitlines()[-1]
    assert last == "entrypoint: error: rank 1 on node2 failed first: exit code 7"


MAIN = {
    "agents": ("a rank is killed", "the launcher is killed", "a rank is stopped", "a node is cut off"),
    "Open MPI": ("a rank is killed", "a node is cut off"),
    "hydra": ("a rank is stopped",),
    "srun": ("a rank is killed", "a node is cut off"),
}


def chosen(way: str) -> list[str]:
    """Return the faults to cause, in one way to start a job."""
    return list(FAULTS) if ALL else list(MAIN[way])


@pytest.mark.parametrize(("way", "name"), [(way, name) for way in WAYS for name in chosen(way)])
def test_failure_ends_whole_job_with_reason(cluster: Cluster, way: str, name: str) -> None:
    started = WAYS[way].start(cluster)
    started[0].wait_for("epoch 3/")
    began = time.monotonic()
    FAULTS[name].cause(cluster, WAYS[way])
    over(cluster, started, FAULTS[name], began)


@pytest.mark.slurm
@pytest.mark.parametrize("name", [name for name in chosen("srun") if name != "the launcher is killed"])
def test_failure_ends_srun_step_with_reason(slurm: Slurm, name: str) -> None:
    words = ("srun", "-N2", "-n2", "-c2", "--kill-on-bad-exit=1", *ENTRYPOINT, "train")
    started = [slurm.start(*words, env=LONG)]
    started[0].wait_for("epoch 3/")
    began = time.monotonic()
    FAULTS[name].cause(slurm.cluster, Way(agents, "srun"))
    # srun 24.11 ends with 1 where a node is lost.
    over(slurm.cluster, started, FAULTS[name], began, own_code=1 if FAULTS[name].cause in (power_off, cut) else 5)


RAISES = """
    import os, time
    if os.environ["RANK"] == "1":
        raise ValueError("mine")
    time.sleep(100)
"""


@pytest.mark.parametrize("way", [pytest.param("agents", marks=in_all), "Open MPI"])
def test_script_exception_on_one_node_ends_all_nodes(cluster: Cluster, way: str) -> None:
    file = script(cluster.folder, "x.py", RAISES)
    if way == "agents":
        started = cluster.agents("run", file)
    else:
        hosts = "--hosts=node1:1,node2:1"
        started = [cluster.start("node1", *ENTRYPOINT, "run", hosts, file, env=cluster.mpi(way))]
    assert [one.code(60) for one in started] == ([5, 1] if way == "agents" else [1])
    cluster.gone(10)
    assert "rank 1 on node2 failed first: exit code 1" in started[0].text()
    text = started[-1].text()
    assert text.index("ValueError: mine") < text.index("failed first")
