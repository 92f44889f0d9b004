"""Ranks that a launcher starts on one node: a rank that fails or is refused ends the others."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Entrypoint, Result, script
from tests.entrypoint.launch.running_ranks import MPI, run_by_mpi, run_together
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


def run_by_hand(entrypoint: Entrypoint, *before: str, **more: str) -> list[Result]:
    """Run two processes with a rank's variables, as a user's own loop does."""
    env = {"LAUNCH_OVERSUBSCRIBE": "1", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", **more}
    ranks = [{**env, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    return run_together(entrypoint, ranks, "run", "--quiet", "x.py", before=before)


@pytest.mark.slow_except("HYDRA-an exit code-1")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("mpi", MPI)
def test_failed_rank_ends_the_others_under_mpirun(entrypoint: Entrypoint, mpi: str, end: str, failing: int) -> None:
    code, how = ENDS[end]
    file = script(entrypoint.folder, "x.py", PROGRAM.replace("{end}", code).replace("{rank}", str(failing)))
    result = run_by_mpi(entrypoint, mpi, 2, file)
    assert result.code == (7 if end == "an exit code" else 5)
    assert re.search(rf"rank {failing} on \S+ failed first: {how}", result.err), result.err


def test_failed_rank_ends_the_others_by_hand(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", PROGRAM.replace("{end}", "sys.exit(7)").replace("{rank}", "1"))
    other, failed = run_by_hand(entrypoint, MASTER_PORT=str(free_port()))
    assert (other.code, failed.code) == (5, 7)
    (line,) = other.error_lines
    assert re.search(r"rank 1 on \S+ failed first: exit code 7", line)


def test_lost_rank_0_is_named(entrypoint: Entrypoint) -> None:
    """Its monitor is killed, which could have printed it."""
    end = "os.kill(os.getppid(), 9)"
    script(entrypoint.folder, "x.py", PROGRAM.replace("{end}", end).replace("{rank}", "0"))
    lost, other = run_by_hand(entrypoint, MASTER_PORT=str(free_port()))
    assert (lost.code, other.code) == (-9, 5)
    assert "rank 0 on " in other.error_lines[0]


@pytest.mark.parametrize("port", ["", "its own"])
def test_ranks_by_hand_may_have_words_of_their_own(entrypoint: Entrypoint, port: str) -> None:
    """As scripts for torch.distributed.launch have them: `--local_rank 1`."""
    script(entrypoint.folder, "x.py", "import os, sys\nassert sys.argv[1:] == ['--local_rank', os.environ['RANK']]\n")
    more = {"MASTER_PORT": str(free_port())} if port else {}
    wrapper = script(entrypoint.folder, "wrapper", 'exec "$@" --local_rank "$RANK"\n')
    ends = run_by_hand(entrypoint, "sh", str(wrapper), **more)
    assert [end.code for end in ends] == [0, 0], ends


@pytest.mark.slow_except("192.0.2.7")
@pytest.mark.parametrize(
    ("name", "what"), [("no.such.invalid", "does not resolve"), ("192.0.2.7", "is another machine's")]
)
def test_master_elsewhere_ends_all_ranks(entrypoint: Entrypoint, name: str, what: str) -> None:
    file = script(entrypoint.folder, "x.py", "")
    more = {"MASTER_ADDR": name, "LAUNCH_RENDEZVOUS_TIMEOUT_S": "5"}
    result = run_by_mpi(entrypoint, "HYDRA", 2, file, **more)
    assert result.code == 4
    assert f"MASTER_ADDR={name}: {what}" in result.error_lines[0]


def test_other_rank_does_not_wait_for_a_refused_one(entrypoint: Entrypoint) -> None:
    """One rank's own environment has a setting that cannot be."""
    script(entrypoint.folder, "x.py", "import time\ntime.sleep(600)\n")
    text = 'if [ "$RANK" = 1 ]; then export LAUNCH_THREADS=x; fi; exec "$@"\n'
    wrapper = script(entrypoint.folder, "wrapper", text)
    other, refused = run_by_hand(entrypoint, "sh", str(wrapper), MASTER_PORT=str(free_port()))
    assert (other.code, refused.code) == (2, 2)
    assert "LAUNCH_THREADS=x" in other.err + other.out
    assert "LAUNCH_THREADS=x" in refused.error_lines[0]
