"""Sums through shared memory, among real processes: right however ranks overtake, and ended where one is lost."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from entrypoint.core.collective_error import COLLECTIVE_ERROR
from tests.conftest import PYTHON, script
from tests.net import free_port

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="sums through shared memory rely on x86-64's order"),
]
START = """
    import os, random, signal, sys, time, torch, torch.distributed as dist
    from train.distributed.shared_memory import SUM_CAPACITY, MEAN_CHUNK, open_shared_memory
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = open_shared_memory(rank, world, float(os.environ.get("LIMIT_S", "30")))
    print("shares", memory is not None, flush=True)
"""
SUMS = """
    chance = random.Random(rank)
    for turn in range(200):
        count = (1, 7, 513, SUM_CAPACITY, SUM_CAPACITY + 1)[turn % 5]
        mine = torch.arange(count, dtype=torch.float64) * (rank + 1) + turn
        if chance.random() < 0.1:
            time.sleep(chance.random() / 100)
        memory.sum(mine)
        expected = torch.arange(count, dtype=torch.float64) * (world * (world + 1) // 2) + turn * world
        assert torch.equal(mine, expected), (turn, mine, expected)
        count = (1, 2, MEAN_CHUNK - 1, 2 * MEAN_CHUNK + 1)[turn % 4]
        parts = [torch.arange(count, dtype=torch.float32) * (one + 1) + turn for one in range(world)]
        mine = parts[rank].clone()
        memory.mean(mine)
        assert torch.equal(mine, torch.stack(parts).sum(0) / world), (turn, mine)
    print("right", flush=True)
"""
LOST = """
    one = torch.ones(1, dtype=torch.float64)
    memory.sum(one)
    if rank == world - 1:
        if sys.argv[1] == "ends":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)
        sys.exit()
    began = time.monotonic()
    try:
        memory.sum(one)
    except RuntimeError as error:
        assert time.monotonic() - began < 5
        print("reported", error, flush=True)
    os._exit(0)
"""

# Rank 1 stops rank 0, which waits for it, for longer than the limit.
SUSPENDED = """
    one = torch.ones(1, dtype=torch.float64)
    dist.broadcast(pid := torch.tensor([os.getpid()]), 0)
    if rank:
        time.sleep(0.5)
        os.kill(int(pid), signal.SIGSTOP)
        time.sleep(3)
        os.kill(int(pid), signal.SIGCONT)
        time.sleep(0.5)
    memory.sum(one)
    print("sum", one.item(), flush=True)
"""


def ranks(folder: Path, body: str, count: int, *words: str, last: tuple[str, ...] = (), **more: str) -> list[str]:
    """Run a script as so many ranks, the last of them by a command of its own; return what each printed."""
    file = script(folder, "ranks.py", START + body)
    environ = (
        os.environ | more | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(count)}
    )
    running = [
        subprocess.Popen(
            [*(last if rank == count - 1 else ()), PYTHON, str(file), *words],
            env=environ | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    return [process.communicate(timeout=120)[0] for process in running]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_shared_memory_sums_and_means_are_correct(tmp_path: Path, count: int) -> None:
    reported = ranks(tmp_path, SUMS, count)
    assert all("shares True" in one and "right" in one for one in reported), reported


@pytest.mark.parametrize(
    ("how", "limit_s", "said"),
    [
        ("ends", "30", "connection closed by rank 2"),
        pytest.param("hangs", "1", "timed out waiting 1 s for rank 2", marks=pytest.mark.slow),
    ],
)
def test_shared_memory_lost_rank_is_reported_by_others(tmp_path: Path, how: str, limit_s: str, said: str) -> None:
    reported = ranks(tmp_path, LOST, 3, how, LIMIT_S=limit_s)
    assert all(f"reported shared memory: {said}" in one for one in reported[:2]), reported
    assert COLLECTIVE_ERROR.search(said)


@pytest.mark.slow
def test_suspended_rank_goes_on(tmp_path: Path) -> None:
    reported = ranks(tmp_path, SUSPENDED, 2, LIMIT_S="2")
    assert all("sum 2.0" in one for one in reported), reported


@pytest.mark.slow
def test_shared_memory_off_across_pid_namespaces(tmp_path: Path) -> None:
    apart = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")
    if not shutil.which("unshare") or subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs unshare(1) and the right to a PID namespace")
    assert ["shares False" in one for one in ranks(tmp_path, "", 2, last=apart)] == [True, True]
