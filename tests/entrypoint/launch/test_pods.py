"""Nodes that are started by hand: pods without LOCAL_RANK, and two nodes with one key of the job or with two."""

from __future__ import annotations

import json

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, Result, needs_two_cores, script
from tests.entrypoint.launch.running_ranks import run_together
from tests.net import free_port

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


@pytest.mark.launch
def test_pods_without_local_rank_train_as_one_job(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    pods = run_pods(entrypoint, "run", "sum.py")
    last_lines = [(pod.code, pod.out.splitlines()[-1:]) for pod in pods]  # before them Gloo prints its own
    assert last_lines == [(0, [f"rank {rank} of 2 sum 2"]) for rank in (0, 1)], pods


@pytest.mark.launch
@pytest.mark.slow
def test_pod_whose_peer_never_comes_ends_in_its_time_limit(entrypoint: Entrypoint) -> None:
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "RANK": "1"}
    assert (
        "entrypoint: error: rank 1 of 2: no gloo connection to the other ranks at 127.0.0.1: "
        in entrypoint.error_line("train", env=environ | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"}, code=4)
    )


@pytest.mark.launch
def test_first_rank_names_those_that_never_come(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    environ = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "RANK": "0"}
    line = entrypoint.error_line("run", "sum.py", env=environ | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"}, code=4)
    assert "ranks 1, 2 did not join within 3 s. Check their output, or raise LAUNCH_RENDEZVOUS_TIMEOUT_S." in line


@pytest.mark.launch
@pytest.mark.versions
def test_nodes_of_an_elastic_job_that_never_come_are_one_line(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    environ = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "LAUNCH_NNODES": "2:3",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    line = entrypoint.error_line("run", "sum.py", env=environ | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"}, code=4)
    assert "the ranks could not be brought together: not enough nodes came within 3 s" in line


@pytest.mark.launch
@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"LAUNCH_NNODES": "1:2", "MASTER_ADDR": "192.0.2.1"}, "is another machine's address, and rank 0 is on "),
        (
            {"LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"},
            "rank 0 at 127.0.0.1 did not answer within 3 s",
        ),
    ],
)
def test_node_of_a_job_never_waits_or_trains_alone(entrypoint: Entrypoint, environ: dict[str, str], said: str) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    port = {} if ":" in environ["LAUNCH_NNODES"] else {"MASTER_PORT": str(free_port())}
    env = environ | port | {"LAUNCH_RENDEZVOUS_TIMEOUT_S": "3"}
    assert said in entrypoint.error_line("run", "sum.py", env=env, code=4)


@pytest.mark.launch
def test_ranks_without_local_size_on_another_node_end_in_time(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "sum.py", SUM)
    assert "Set LOCAL_WORLD_SIZE to that number." in entrypoint.error_line(
        "run", "sum.py", env={"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "192.0.2.1"}
    )


SHOW = """
    import json, os
    print(json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], "ENTRYPOINT_JOB_KEY" in os.environ]), flush=True)
"""


def run_nodes(entrypoint: Entrypoint, keys: tuple[str, str], limit_s: int, **more: str) -> list[Result]:
    """Run both nodes on this machine."""
    script(entrypoint.folder, "x.py", SHOW)
    shared = {
        "LAUNCH_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1",
        "LAUNCH_QUIET": "1", "LAUNCH_RENDEZVOUS_TIMEOUT_S": str(limit_s), "GLOO_SOCKET_IFNAME": "lo", **more,
    }  # fmt: skip
    for number, key in enumerate(keys):
        script(entrypoint.folder, f"key{number}", key).chmod(0o600)
    nodes = [{**shared, "LAUNCH_NODE_RANK": node, "LAUNCH_SECRET_FILE": f"key{node}"} for node in "01"]
    return run_together(entrypoint, nodes, "run", "x.py")


@pytest.mark.launch
@needs_two_cores
def test_nodes_with_one_key_train_together(entrypoint: Entrypoint) -> None:
    nodes = run_nodes(entrypoint, ("one key of a job",) * 2, 300, MASTER_PORT=str(free_port()))
    assert [node.code for node in nodes] == [0, 0], nodes
    lines = sorted(json.loads(line) for node in nodes for line in node.out.splitlines())
    assert lines == [[str(rank), "4", False] for rank in range(4)]


@pytest.mark.launch
@needs_two_cores
def test_nodes_with_two_keys_are_refused(entrypoint: Entrypoint) -> None:
    first, second = run_nodes(entrypoint, ("one key of a job", "another key of a job"), 8)
    assert (second.code, second.out) == (ExitCode.RENDEZVOUS, "")
    assert "What answers there does not take part: it has another key than this job's" in second.err
    assert first.code != 0, "rank 0's program ended, and the other node did not come"


@pytest.mark.launch
@pytest.mark.parametrize(
    ("name", "said"),
    [("short", "has less than 16 bytes. Make one"), ("nobody", "cannot be read (No such file"), ("open", "chmod 600")],
)
def test_file_that_is_no_key_is_refused_by_the_plan(entrypoint: Entrypoint, name: str, said: str) -> None:
    script(entrypoint.folder, "x.py", SHOW)
    script(entrypoint.folder, "short", "key").chmod(0o600)
    script(entrypoint.folder, "open", "k" * 32).chmod(0o666)
    env = {"LAUNCH_NNODES": "2", "MASTER_ADDR": "127.0.0.1", "LAUNCH_SECRET_FILE": name}
    for words in (("plan", "run", "x.py"), ("run", "x.py")):
        assert said in entrypoint.error_line(*words, env=env)
