"""Processes with RANK and WORLD_SIZE but no LOCAL_RANK, started for real on this machine."""

from __future__ import annotations

import pytest

from tests.conftest import Entrypoint, Result, script
from tests.entrypoint.launch.running_ranks import run_together
from tests.net import free_port

pytestmark = pytest.mark.launch

SUM = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "of", dist.get_world_size(), "sum", int(total), flush=True)
    dist.destroy_process_group()
"""


def run_pods(entrypoint: Entrypoint, *words: str, **more: str) -> list[Result]:
    """Run two processes as Volcano's pytorch plugin starts them."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **more}
    return run_together(entrypoint, [{**shared, "RANK": rank} for rank in "01"], *words)


def test_pods_without_local_rank_train_as_one_job(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    pods = run_pods(entrypoint, "run", "sum.py")
    last_lines = [(pod.code, pod.out.splitlines()[-1:]) for pod in pods]  # before them Gloo prints its own
    assert last_lines == [(0, [f"rank {rank} of 2 sum 2"]) for rank in (0, 1)], pods


@pytest.mark.slow
def test_pod_whose_peer_never_comes_ends_in_its_time_limit(entrypoint: Entrypoint) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "1"}
    ended = entrypoint("train", env=environ | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"})
    assert ended.code == 4, ended.err
    assert "entrypoint: error: rank 1 of 2: no gloo connection to the other ranks at 127.0.0.1: " in ended.err


def test_ranks_without_local_size_on_another_node_end_in_time(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    ended = entrypoint(
        "run", "sum.py", env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1"}
    )
    assert ended.code == 2
    assert "Set LOCAL_WORLD_SIZE to that number." in ended.err
