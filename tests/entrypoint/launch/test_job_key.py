"""Two nodes by hand: they train together with one key, and with two keys neither trains alone."""

from __future__ import annotations

import json

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import Entrypoint, Result, needs_two_cores, script
from tests.entrypoint.launch.running_ranks import run_together
from tests.net import free_port

pytestmark = [pytest.mark.launch, needs_two_cores]

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


def test_nodes_with_one_key_train_together(entrypoint: Entrypoint) -> None:
    nodes = run_nodes(entrypoint, ("one key of a job",) * 2, 300, MASTER_PORT=str(free_port()))
    assert [node.code for node in nodes] == [0, 0], nodes
    lines = sorted(json.loads(line) for node in nodes for line in node.out.splitlines())
    assert lines == [[str(rank), "4", False] for rank in range(4)]


def test_nodes_with_two_keys_are_refused(entrypoint: Entrypoint) -> None:
    first, second = run_nodes(entrypoint, ("one key of a job", "another key of a job"), 20)
    assert (second.code, second.out) == (ExitCode.RENDEZVOUS, "")
    assert "What answers there does not take part: it has another key than this job's" in second.err
    assert first.code != 0, "rank 0's program ended, and the other node did not come"
