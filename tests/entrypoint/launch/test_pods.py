"""Processes with RANK and WORLD_SIZE but no LOCAL_RANK, started for real on this machine."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import PYTHON, script
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


def start_pods(folder: Path, *words: str, **more: str) -> list[tuple[int, str, str]]:
    """Start two processes as Volcano's pytorch plugin does; return exit code, output and errors of each."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", **more}
    pods = [
        subprocess.Popen(
            (PYTHON, "-m", "entrypoint", *words),
            cwd=folder,
            env={**os.environ, **shared, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    answers = [pod.communicate(timeout=120) for pod in pods]
    return [(pod.returncode, *answer) for pod, answer in zip(pods, answers, strict=True)]


def test_pods_without_local_rank_train_as_one_job(tmp_path: Path) -> None:
    script(tmp_path, "sum.py", SUM)
    results = start_pods(tmp_path, "run", "sum.py")
    last_lines = [(code, out.splitlines()[-1:]) for code, out, _ in results]  # before them Gloo prints its own
    assert last_lines == [(0, [f"rank {rank} of 2 sum 2"]) for rank in (0, 1)], results


def test_pods_of_the_trainer_write_one_run(tmp_path: Path) -> None:
    results = start_pods(tmp_path, "train", TRAIN_EPOCHS="1")
    assert [code for code, _, _ in results] == [0, 0], results
    (folder,) = [path for path in (tmp_path / "runs").iterdir() if not path.is_symlink()]
    assert json.loads((folder / "summary.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_pod_whose_peer_never_comes_ends_in_its_time_limit(tmp_path: Path) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "1"}
    ended = subprocess.run(
        (PYTHON, "-m", "entrypoint", "train"),
        cwd=tmp_path,
        env={**os.environ, **environ, "LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 4, ended.stderr
    assert "entrypoint: error: " in ended.stderr
    assert "timed out after 3000ms" in ended.stderr


def test_ranks_without_local_size_on_another_node_end_in_time(tmp_path: Path) -> None:
    script(tmp_path, "sum.py", SUM)
    lone = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1"}
    ended = subprocess.run(
        (PYTHON, "-m", "entrypoint", "run", "sum.py"),
        cwd=tmp_path,
        env={**os.environ, **lone},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 2
    assert "Set LOCAL_WORLD_SIZE to that number." in ended.stderr
