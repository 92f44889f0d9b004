"""A host without the job's key, next to a job over two nodes, with torch's own client: it gets into no rank."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from entrypoint.job.node_group import FIRST_PORT
from tests.cluster.conftest import ENTRYPOINT, Cluster, Slurm, Started
from tests.conftest import script

pytestmark = pytest.mark.cluster

# What a plain torchrun script does, and what makes it dangerous: ranks unpickle each other's objects.
PROGRAM = """
    import os, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    names = [None] * dist.get_world_size()
    dist.all_gather_object(names, os.environ["RANK"])
    open("met", "w").close()
    while not os.path.exists("end"):
        time.sleep(0.1)
    dist.barrier()
    print("met", names, flush=True)
    dist.destroy_process_group()
"""
# Tries to join at every port of node1 that other hosts reach, and to send rank 0 a pickle that writes a file.
STRANGER = """
    import os, socket, sys, threading
    from datetime import timedelta
    import torch.distributed as dist

    class Evil:
        def __reduce__(self):
            return os.system, ("touch hostile-was-here",)

    def attack(port):
        os.environ.update(MASTER_ADDR="node1", MASTER_PORT=str(port), RANK="1", WORLD_SIZE="2")
        store = dist.TCPStore("node1", port, None, False, timedelta(seconds=2), False)
        print("joined", port, store.num_keys(), flush=True)
        dist.init_process_group("gloo", timeout=timedelta(seconds=5))
        dist.all_gather_object([None, None], Evil())

    for port in map(int, sys.argv[1:]):
        if os.fork() == 0:
            threading.Timer(8, os._exit, (0,)).start()  # some of torch's calls have no limit
            half_open = socket.create_connection(("node1", port))
            half_open.send(bytes([0]))
            try:
                attack(port)
            except Exception as error:
                print("refused", port, str(error)[:60], flush=True)
            os._exit(0)
    for _ in sys.argv[1:]:
        os.wait()
    print("tried", len(sys.argv) - 1, flush=True)
"""
# Prints the ports on which other hosts reach this node.
LISTENING = """
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in map(str.split, open(name).readlines()[1:]):
            address, port = row[1].split(":")
            if row[3] == "0A" and not address.endswith(("0100007F", "01000000")):
                print(int(port, 16))
"""
KEY = {"LAUNCH_SECRET_FILE": "key", "LAUNCH_RENDEZVOUS_TIMEOUT_S": "60"}


@pytest.fixture
def program(cluster: Cluster) -> Path:
    (cluster.folder / "key").write_text("0123456789abcdef0123456789abcdef")
    (cluster.folder / "key").chmod(0o600)
    for name, text in (("stranger.py", STRANGER), ("listening.py", LISTENING)):
        script(cluster.folder, name, text)
    return script(cluster.folder, "x.py", PROGRAM)


def attack(cluster: Cluster, lowest: int = 1025) -> None:
    """Let a stranger on node2 try all open ports of node1 from `lowest` on; one at least must be open."""
    python = ENTRYPOINT[0]
    until = time.monotonic() + 40
    ports: list[str] = []
    while not ports:
        assert time.monotonic() < until, "\n".join(one.text()[-2000:] for one in cluster.started)
        words = cluster.run("node1", python, "listening.py").out.split()
        ports = sorted({port for port in words if port.isdecimal() and int(port) >= lowest})
        time.sleep(0.5)
    result = cluster.run("node2", python, "stranger.py", *ports)
    assert f"tried {len(ports)}" in result.out, result.out
    assert "joined" not in result.out
    assert not (cluster.folder / "hostile-was-here").exists()


def end(cluster: Cluster, ranks: list[Started]) -> None:
    """Let the ranks end, which must all have met."""
    (cluster.folder / "end").touch()
    assert [one.code(60) for one in ranks] == [0] * len(ranks), "\n".join(one.text()[-3000:] for one in ranks)
    assert "met ['0', '1']" in ranks[0].text()
    assert not (cluster.folder / "hostile-was-here").exists()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({}, id="a port from the job's words"),
        pytest.param({"MASTER_PORT": "29500"}, id="the user's port"),
        pytest.param({"MASTER_PORT": "29500", "LAUNCH_MAX_RESTARTS": "1"}, id="torchrun's agents"),
    ],
)
def test_stranger_joins_at_no_moment(cluster: Cluster, program: Path, more: Mapping[str, str]) -> None:
    (first,) = cluster.agents("run", program.name, env={**KEY, **more}, numbers=[0])
    attack(cluster)  # before the other node comes
    (other,) = cluster.agents("run", program.name, env={**KEY, **more}, numbers=[1])
    cluster.wait_for_file(Path("met"))
    attack(cluster)  # while the ranks run
    end(cluster, [first, other])


def test_stranger_does_not_join_the_trainer(cluster: Cluster, program: Path) -> None:
    assert program
    env = {**KEY, "TRAIN_DATASET": "digits", "TRAIN_EPOCHS": "1", "TRAIN_RUN_NAME": "one"}
    (first,) = cluster.agents("train", env=env, numbers=[0])
    attack(cluster)
    (other,) = cluster.agents("train", env=env, numbers=[1])
    assert [first.code(), other.code()] == [0, 0], first.text()[-3000:] + other.text()[-3000:]
    assert cluster.summary("one")["epochs"] == 1


@pytest.mark.parametrize("which", ["Open MPI", "hydra"])
def test_stranger_does_not_join_under_mpirun(cluster: Cluster, program: Path, which: str) -> None:
    words = (*ENTRYPOINT, "run", "--hosts=node1:1,node2:1", program.name)
    job = cluster.start("node1", *words, env=cluster.mpi(which))
    cluster.wait_for_file(Path("met"))
    attack(cluster, FIRST_PORT)  # hydra's own port is none of ours: its mpiexec ends when a stranger writes to it
    end(cluster, [job])


def test_stranger_does_not_join_under_srun(slurm: Slurm, program: Path) -> None:
    words = ("srun", "-N2", "-n2", *ENTRYPOINT, "run", program.name)
    job = slurm.start(*words, env=KEY)
    slurm.cluster.wait_for_file(Path("met"))
    attack(slurm.cluster)
    end(slurm.cluster, [job])
