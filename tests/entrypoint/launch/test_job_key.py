"""Two nodes by hand: they train together with one key, and with two keys neither trains alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, needs_two_cores, script
from tests.net import free_port

pytestmark = [pytest.mark.launch, needs_two_cores]

SHOW = """
    import json, os
    print(json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], "ENTRYPOINT_JOB_KEY" in os.environ]), flush=True)
"""


def start(entrypoint: Entrypoint, keys: tuple[str, str], limit_s: int, **more: str) -> list[tuple[int, str, str]]:
    """Run both nodes on this machine; return the exit code and output of each."""
    script(entrypoint.folder, "x.py", SHOW)
    nodes = []
    for number, key in enumerate(keys):
        (entrypoint.folder / f"key{number}").write_text(key)
        (entrypoint.folder / f"key{number}").chmod(0o600)
        environ = {
            "LAUNCH_NNODES": "2", "LAUNCH_NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1",
            "LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_QUIET": "1",
            "LAUNCH_RENDEZVOUS_TIMEOUT_S": str(limit_s), "LAUNCH_SECRET_FILE": f"key{number}",
            "HOME": str(entrypoint.home), "GLOO_SOCKET_IFNAME": "lo", **more,
        }  # fmt: skip
        nodes.append(run(entrypoint.folder, environ))
    return [(node.wait(LAUNCH_LIMIT_S), *node.communicate()) for node in nodes]


def run(folder: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PYTHON, "-m", "entrypoint", "run", "x.py"],
        cwd=folder, env=clean_environment() | environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_nodes_with_one_key_train_together(entrypoint: Entrypoint) -> None:
    nodes = start(entrypoint, ("one key of a job",) * 2, 300, MASTER_PORT=str(free_port()))
    assert [code for code, *_ in nodes] == [0, 0], nodes
    lines = sorted(json.loads(line) for _, out, _ in nodes for line in out.splitlines())
    assert lines == [[str(rank), "4", False] for rank in range(4)]


def test_nodes_with_two_keys_are_refused(entrypoint: Entrypoint) -> None:
    first, second = start(entrypoint, ("one key of a job", "another key of a job"), 20)
    assert (second[0], second[1]) == (ExitCode.RENDEZVOUS, "")
    assert "What answers there does not take part: it has another key than this job's" in second[2]
    assert first[0] != 0, "rank 0's program ended, and the other node did not come"
