"""How a job begins and ends over several nodes: all ranks start, or all learn why not, late ones too."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.conftest import ENTRYPOINT, Cluster, Slurm, Started, main_ones
from tests.conftest import script

pytestmark = pytest.mark.cluster

HELLO = "import os; print('hello from rank', os.environ['RANK'])"
# Prints which run's ranks have met.
WHO = """
    import os, sys
    import torch.distributed as dist
    dist.init_process_group("gloo")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, sys.argv[1])
    print("met", sys.argv[1], names, flush=True)
    dist.destroy_process_group()
"""
# A rank must not wait as long as this.
WAIT = {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "90"}
SOON_S = 30
RUN = (*ENTRYPOINT, "run", "x.py")


def texts(started: list[Started]) -> str:
    return "\n".join(one.text()[-2000:] for one in started)


def codes(started: list[Started], limit_s: float = SOON_S) -> list[int]:
    return [one.code(limit_s) for one in started]


def by_hosts(which: str) -> Callable[[Cluster, str], list[Started]]:
    """`entrypoint run --hosts …`: mpirun starts the ranks."""

    def start(cluster: Cluster, name: str) -> list[Started]:
        words = (*ENTRYPOINT, "run", "--hosts=node1:1,node2:1", "x.py", name)
        return [cluster.start("node1", *words, env=WAIT | cluster.mpi(which))]

    return start


def under_mpirun(which: str) -> Callable[[Cluster, str], list[Started]]:
    """`mpirun … entrypoint run`: nobody says where rank 0 is, or which run this is."""

    def start(cluster: Cluster, name: str) -> list[Started]:
        words = ("mpirun", "-np", "2", "--host", "node1:1,node2:1", "-x", "LAUNCH_RENDEZVOUS_TIMEOUT_S")
        return [cluster.start("node1", *words, *RUN, name, env=WAIT | cluster.mpi(which))]

    return start


def under_hydra(cluster: Cluster, name: str) -> list[Started]:
    words = ("mpirun", "-n", "2", "-hosts", "node1:1,node2:1", "-genv", "MASTER_ADDR", "node1")
    return [cluster.start("node1", *words, *RUN, name, env=WAIT | cluster.mpi("hydra"))]


def by_hand(cluster: Cluster, name: str) -> list[Started]:
    return cluster.agents("run", "x.py", name, env=WAIT)


WAYS = {
    "by hand": by_hand,
    "hosts of Open MPI": by_hosts("Open MPI"),
    "hosts of Open MPI 5": by_hosts("Open MPI 5"),
    "under Open MPI": under_mpirun("Open MPI"),
    "under Open MPI 5": under_mpirun("Open MPI 5"),
    "under hydra": under_hydra,
}


@pytest.mark.parametrize("way", main_ones(WAYS, "by hand", "hosts of Open MPI", "under hydra"))
def test_short_program_runs_on_all_ranks(cluster: Cluster, way: str) -> None:
    script(cluster.folder, "x.py", HELLO)
    for _ in range(2):
        started = WAYS[way](cluster, "A")
        assert set(codes(started)) == {0}, texts(started)
        assert sorted(re.findall("hello from rank .", texts(started))) == [f"hello from rank {rank}" for rank in (0, 1)]


@pytest.mark.slurm
def test_short_program_runs_on_all_ranks_of_srun(slurm: Slurm) -> None:
    script(slurm.cluster.folder, "x.py", HELLO)
    for _ in range(2):
        one = slurm.start("srun", "-n4", "-N2", *RUN, env=WAIT)
        assert one.code(SOON_S) == 0, one.text()
        assert one.text().count("hello from rank") == 4


@pytest.mark.parametrize("late", main_ones([0, 1], 0))
def test_late_node_joins_program_that_has_ended(cluster: Cluster, late: int) -> None:
    script(cluster.folder, "x.py", HELLO)
    early = cluster.agents("run", "x.py", env=WAIT, numbers=[1 - late])
    time.sleep(3)
    started = early + cluster.agents("run", "x.py", env=WAIT, numbers=[late])
    assert codes(started) == [0, 0], texts(started)
    assert texts(started).count("hello from rank") == 2


def test_rank_0_learns_that_a_rank_failed_after_its_own_end(cluster: Cluster) -> None:
    script(
        cluster.folder, "x.py", "import os, time; rank = int(os.environ['RANK']); time.sleep(3 * rank); exit(9 * rank)"
    )
    started = cluster.agents("run", "x.py", env=WAIT)
    assert codes(started) == [5, 9], texts(started)
    assert "rank 1 on node2 failed first: exit code 9" in started[0].text()


def check_two_runs(started: list[Started]) -> None:
    assert set(codes(started, 60)) == {0}, texts(started)
    met = sorted(re.findall("^met .*", texts(started), re.MULTILINE))
    assert met == ["met A ['A', 'A']"] * 2 + ["met B ['B', 'B']"] * 2, "each with its own"


@pytest.mark.parametrize("way", main_ones(["under hydra", "under Open MPI"], "under hydra"))
def test_two_runs_on_same_nodes_stay_apart(cluster: Cluster, way: str) -> None:
    script(cluster.folder, "x.py", WHO)
    check_two_runs(WAYS[way](cluster, "A") + WAYS[way](cluster, "B"))


def test_second_run_by_hand_names_master_port_and_goes(cluster: Cluster) -> None:
    program = "import os, time\nprint('started', flush=True)\nwhile not os.path.exists('over'):\n    time.sleep(0.1)\n"
    script(cluster.folder, "x.py", program)
    first = cluster.agents("run", "x.py", "A", env=WAIT)
    for agent in first:
        agent.wait_for("started")
    second = cluster.agents("run", "x.py", "B", env={"LAUNCH_RENDEZVOUS_TIMEOUT_S": "5"})
    assert codes(second) == [4, 4], texts(second)
    assert re.search(r"MASTER_PORT=61000, from the job's id: port \d+ is taken on this node", second[0].text())
    assert "Another run answers there: 61000 program x.py A" in second[1].text()
    assert "Set MASTER_PORT" in second[0].text()
    script(cluster.folder, "over", "")
    assert codes(first) == [0, 0], texts(first)


@pytest.mark.slurm
def test_two_steps_of_a_job_stay_apart(slurm: Slurm) -> None:
    script(slurm.cluster.folder, "x.py", WHO)
    step = f"srun --exact -N2 -n2 -c1 {' '.join(RUN)}"
    both = script(slurm.cluster.folder, "both.sh", f"#!/bin/sh\n{step} A & a=$!\n{step} B || exit 1\nwait $a\n")
    check_two_runs([slurm.start("salloc", "-N2", "--ntasks-per-node=2", "sh", both, env=WAIT)])


@pytest.mark.parametrize("refused", main_ones([0, 1], 1))
def test_refused_plan_of_one_node_ends_all(cluster: Cluster, refused: int) -> None:
    envs: list[dict[str, str]] = [{}, {}]
    envs[refused] = {"LAUNCH_NPROC_PER_NODE": "99"}
    script(cluster.folder, "x.py", WHO)
    both = [cluster.agents("run", "x.py", "A", env=WAIT | env, numbers=[number]) for number, env in enumerate(envs)]
    started = [agent for (agent,) in both]
    assert codes(started) == [3, 3], texts(started)
    assert "entrypoint: error: LAUNCH_NPROC_PER_NODE=99: more ranks than cores" in started[refused].text()
    assert f"node{refused + 1}: LAUNCH_NPROC_PER_NODE=99: more ranks than cores" in started[1 - refused].text()


@pytest.mark.slurm
def test_refused_task_ends_step_without_kill_on_bad_exit(slurm: Slurm) -> None:
    script(slurm.cluster.folder, "x.py", WHO)
    words = f"test $SLURM_PROCID = 1 && export LAUNCH_CPU_BINDING=nonsense; exec {' '.join(RUN)} A"
    one = slurm.start("srun", "-N2", "-n2", "--kill-on-bad-exit=0", "sh", "-c", words, env=WAIT)
    assert one.code(SOON_S) == 2, one.text()
    assert "node2: LAUNCH_CPU_BINDING=nonsense" in one.text()


@pytest.mark.parametrize(
    ("verb", "number", "code", "message"),
    [
        ("run", signal.SIGTERM, 143, "stopped by SIGTERM"),
        ("run", signal.SIGINT, 130, "stopped by SIGINT"),
        ("run", signal.SIGUSR1, 138, "with exit code 138"),
        ("train", signal.SIGUSR1, 75, "preempted: stopped by SIGUSR1 before the first step"),
    ],
)
def test_waiting_rank_obeys_signals(
    cluster: Cluster, verb: str, number: signal.Signals, code: int, message: str
) -> None:
    script(cluster.folder, "x.py", HELLO)
    words = (verb, "x.py") if verb == "run" else (verb,)
    (one,) = cluster.agents(*words, env=WAIT, numbers=[1])
    one.wait_for("rank 1 waits for rank 0 at node1")
    began = time.monotonic()
    assert cluster.signal("node2", "ep-agent", number) == 1
    assert one.code(SOON_S) == code, one.text()
    assert time.monotonic() - began < 5
    assert message in one.text()


def test_program_that_dies_before_it_starts_is_a_failure(cluster: Cluster) -> None:
    script(cluster.folder, "x.py", HELLO)
    (one,) = cluster.agents("run", "x.py", env=WAIT, numbers=[1])
    one.wait_for("rank 1 waits for rank 0 at node1")
    _, program = sorted(cluster.pids("node2", "ep-monitor"))  # it has its monitor's name until it starts
    cluster.do("exec", "node2", "kill", "-KILL", str(program))
    (rank0,) = cluster.agents("run", "x.py", env=WAIT, numbers=[0])
    assert codes([rank0, one]) == [5, 5], texts([rank0, one])
    assert "rank 1 on node2 failed first: killed by SIGKILL" in rank0.text()


def test_waiting_rank_under_mpirun_saves_nothing_at_a_warning(cluster: Cluster) -> None:
    words = f"test $OMPI_COMM_WORLD_RANK = 0 && exec sleep 100; exec {' '.join(ENTRYPOINT)} train"
    hosts = ("mpirun", "-np", "2", "--host", "node1:1,node2:1")
    one = cluster.start("node1", *hosts, "sh", "-c", words, env=WAIT | cluster.mpi("Open MPI"))
    one.wait_for("rank 1 waits for rank 0")
    assert cluster.signal("node2", "ep-monitor", signal.SIGUSR1) == 2, "the monitor, and the program that waits"
    assert one.code(SOON_S) == 75, one.text()


RANKFILE = "rank 0=node2 slot=0\nrank 1=node1 slot=0\n"


@pytest.mark.parametrize("version", ["Open MPI", "Open MPI 5"])
def test_rank_0_on_another_node_than_mpirun_says_so(cluster: Cluster, version: str) -> None:
    script(cluster.folder, "x.py", WHO)
    where: dict[str, tuple[str | Path, ...]] = {
        "Open MPI": ("--host", "node1:1,node2:1", "-rf", script(cluster.folder, "ranks", RANKFILE)),
        "Open MPI 5": ("--host", "node2:1,node1:1"),
    }
    words = ("mpirun", "-np", "2", *where[version])
    one = cluster.start("node1", *words, *RUN, "A", env=WAIT | cluster.mpi(version))
    assert one.code(SOON_S) == 4, one.text()
    assert re.search(
        r"MASTER_ADDR=(node1|10\.\d+\.0\.1): is another machine's address, and rank 0 is on node2", one.text()
    )
    assert "Start the ranks with mpirun -x MASTER_ADDR=node2" in one.text()
    again = ("mpirun", "-np", "2", *where[version], "-x", "MASTER_ADDR=node2")
    assert cluster.run("node1", *again, *RUN, "A", env=WAIT | cluster.mpi(version)).code == 0


def test_rank_0_elsewhere_ends_job_of_hydra(cluster: Cluster) -> None:
    script(cluster.folder, "x.py", WHO)
    words = ("mpirun", "-n", "2", "-hosts", "node2:1,node1:1", "-genv", "MASTER_ADDR", "node1")
    one = cluster.start("node1", *words, *RUN, "A", env=WAIT | cluster.mpi("hydra"))
    assert one.code(SOON_S) != 0
    assert "rank 0 is on node2. Start the ranks with mpiexec -genv MASTER_ADDR node2" in one.text()


@pytest.mark.parametrize("which", main_ones(["Open MPI", "Open MPI 5", "hydra"], "Open MPI"))
def test_hosts_may_list_this_node_last(cluster: Cluster, which: str) -> None:
    script(cluster.folder, "x.py", WHO)
    words = (*ENTRYPOINT, "run", "--hosts=node2:1,node1:1", "x.py", "A")
    done = cluster.run("node1", *words, env=WAIT | cluster.mpi(which)).succeeded()
    assert done.out.count("met A ['A', 'A']") == 2
