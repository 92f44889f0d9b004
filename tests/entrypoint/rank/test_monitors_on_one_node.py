"""Ranks that a launcher starts on one node: a rank that fails or is refused ends the others."""

from __future__ import annotations

import re
import subprocess
import time

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, Result, clean_environment, script
from tests.entrypoint.launch.running_ranks import MPI, run_by_mpi
from tests.net import free_port

pytestmark = pytest.mark.launch

# The other rank is in no collective that could fail.
PROGRAM = """
    import os, sys, time

    print("rank", os.environ["RANK"], flush=True)
    if os.environ["RANK"] == "{rank}":
        time.sleep(1)
        {end}
    time.sleep(600)
"""
ENDS = {"an exit code": ("sys.exit(7)", "exit code 7"), "a signal": ("os.kill(os.getpid(), 9)", "killed by SIGKILL")}


def start_by_hand(entrypoint: Entrypoint, *before: str, **more: str) -> list[subprocess.Popen[str]]:
    """Start two processes with a rank's variables, as a user's own loop does."""
    env = {**clean_environment(), "HOME": str(entrypoint.home), "LAUNCH_OVERSUBSCRIBE": "1", "MASTER_ADDR": "localhost"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **more}
    return [
        subprocess.Popen(
            [*before, PYTHON, "-m", "entrypoint", "run", "--quiet", "x.py"],
            env={**env, "RANK": rank, "LOCAL_RANK": rank},
            cwd=entrypoint.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]


def ends_of(started: list[subprocess.Popen[str]]) -> list[Result]:
    """Wait until all have ended."""
    said = [one.communicate(timeout=LAUNCH_LIMIT_S) for one in started]
    return [Result(one.returncode, *texts) for one, texts in zip(started, said, strict=True)]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mpi", MPI)
def test_failed_rank_ends_the_others_under_mpirun(entrypoint: Entrypoint, mpi: str, end: str, failing: int) -> None:
    code, how = ENDS[end]
    file = script(entrypoint.folder, "x.py", PROGRAM.replace("{end}", code).replace("{rank}", str(failing)))
    result = run_by_mpi(entrypoint, mpi, 2, file)
    assert result.code == (7 if end == "an exit code" else 5)
    assert re.search(rf"rank {failing} on \S+ failed first: {how}", result.err), result.err


@pytest.mark.parametrize("port", ["", "its own"])
def test_failed_rank_ends_the_others_by_hand(entrypoint: Entrypoint, port: str) -> None:
    script(entrypoint.folder, "x.py", PROGRAM.replace("{end}", "sys.exit(7)").replace("{rank}", "1"))
    more = {"MASTER_PORT": str(free_port())} if port else {}
    other, failed = ends_of(start_by_hand(entrypoint, **more))
    assert (other.code, failed.code) == (5, 7)
    (line,) = other.error_lines
    assert re.search(r"rank 1 on \S+ failed first: exit code 7", line)


SUM = """
    import os, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(float(os.environ["OWN"]))
    dist.all_reduce(value)
    time.sleep(4)
    print("sum", value.item())
"""


def test_two_jobs_by_hand_at_once_take_two_ports(entrypoint: Entrypoint) -> None:
    """Both have the same command. Without a launcher's id only rank 0's monitor can tell them apart."""
    script(entrypoint.folder, "x.py", SUM)
    first = start_by_hand(entrypoint, OWN="1")
    time.sleep(2)  # ranks of two jobs that start at once may meet
    second = start_by_hand(entrypoint, OWN="10")
    ends = [*ends_of(first), *ends_of(second)]
    assert [end.code for end in ends] == [0, 0, 0, 0], ends
    assert [end.out.splitlines()[-1] for end in ends] == ["sum 2.0", "sum 2.0", "sum 20.0", "sum 20.0"]


def test_other_rank_does_not_wait_for_a_refused_one(entrypoint: Entrypoint) -> None:
    """One rank's own environment has a setting that cannot be."""
    script(entrypoint.folder, "x.py", "import time\ntime.sleep(600)\n")
    text = 'if [ "$RANK" = 1 ]; then export LAUNCH_THREADS=x; fi; exec "$@"\n'
    wrapper = script(entrypoint.folder, "wrapper", text)
    other, refused = ends_of(start_by_hand(entrypoint, "sh", str(wrapper)))
    assert (other.code, refused.code) == (2, 2)
    assert "LAUNCH_THREADS=x" in other.err + other.out
    assert "LAUNCH_THREADS=x" in refused.error_lines[0]
