"""Which rank of a user's own script is named when a collective fails, and with which code the job ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import pytest

from entrypoint.hang.stacks import Whereabouts
from entrypoint.launch.failures import Failure, explain_hang
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, Result, clean_environment, script
from tests.entrypoint.launch.running_ranks import MPI, run_by_mpi
from tests.processes import killed_at_end, wait_until

pytestmark = [pytest.mark.launch, pytest.mark.versions]

# Both ranks meet once, and then rank 1 goes its own way.
PROGRAM = """
    import os, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    dist.all_reduce(torch.ones(1))
    def own_way():
        open("ready.new", "w").write(str(os.getpid()))
        os.rename("ready.new", "ready")
        {own_way}
    if os.environ["RANK"] == "1":
        own_way()
    dist.barrier()
"""
WORDS = ("run", "--nproc-per-node=2", "--oversubscribe=1", "--quiet", "--grace-period-s=1", "x.py")


def run(entrypoint: Entrypoint, own_way: str, *flags: str, stop: bool = False) -> tuple[Result, str]:
    """Run the program, stop rank 1 if asked to, and return how the job ended and rank 1's process."""
    file = script(entrypoint.folder, "x.py", PROGRAM.replace("{own_way}", own_way))
    env = {**clean_environment(), "HOME": str(entrypoint.home)}
    ready = entrypoint.folder / "ready"
    with killed_at_end(
        [PYTHON, "-m", "entrypoint", *WORDS[:-1], *flags, str(file)], cwd=entrypoint.folder, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as job:  # fmt: skip
        wait_until(lambda: ready.exists() or job.poll() is not None)
        if stop:
            os.kill(int(ready.read_text()), signal.SIGSTOP)
        out, err = job.communicate(timeout=LAUNCH_LIMIT_S)
    return Result(job.returncode, out, err), ready.read_text()


def test_rank_that_leaves_out_a_collective_is_named(entrypoint: Entrypoint) -> None:
    result, process = run(entrypoint, "time.sleep(600)")
    file = entrypoint.folder / "x.py"
    where = f"process {process} is at {file}:12 in own_way"
    assert result.error_lines == [
        f"entrypoint: error: rank 1 is missing from barrier at {file}:15, where rank 0 waited until its time limit:"
        f" {where}"
    ]
    stacks = result.err.partition(f"rank 1  {where}\n")[2].splitlines()
    assert stacks[1:3] == [f'    File "{file}", line 12 in own_way', f'    File "{file}", line 14 in <module>']
    assert result.code == 1, "the code of the rank that waited"


def test_stopped_rank_is_named_not_its_victim(entrypoint: Entrypoint) -> None:
    result, process = run(entrypoint, "time.sleep(2)", stop=True)
    (line,) = result.error_lines
    assert line.startswith("entrypoint: error: rank 1 is missing from barrier at ")
    assert line.endswith(f"where rank 0 waited until its time limit: process {process} is stopped (SIGSTOP)")


@pytest.mark.slow_except("Open MPI")
@pytest.mark.parametrize("mpi", MPI)
def test_rank_of_mpirun_that_is_missing_is_named_once(entrypoint: Entrypoint, mpi: str) -> None:
    file = script(entrypoint.folder, "x.py", PROGRAM.replace("{own_way}", "time.sleep(600)"))
    result = run_by_mpi(entrypoint, mpi, 3, file)
    process = (entrypoint.folder / "ready").read_text()
    (line,) = [line for line in result.err.splitlines() if "missing from" in line]
    assert re.fullmatch(
        rf"entrypoint: rank 1 is missing from barrier at {file}:15, where rank [02] waited in vain:"
        rf" process {process} on {socket.gethostname()} is at {file}:12 in own_way",
        line,
    )
    assert f'    File "{file}", line 12 in own_way\n' in result.err
    assert result.code == (1 if mpi == "Open MPI" else 1 | 5), "hydra combines the codes"


SLOW_MODEL = """
    import os, time
    import torch

    class Model(torch.nn.Linear):
        calls = 0

        def forward(self, images):
            self.calls += 1
            if os.environ.get("RANK") == "1" and self.calls == 6:
                time.sleep(600)
            return super().forward(images.flatten(1))

    def build(num_classes):
        return Model(64, num_classes)
"""


def test_stacks_of_a_trainer_that_hangs_come_before_the_error(entrypoint: Entrypoint) -> None:
    file = script(entrypoint.folder, "slow.py", SLOW_MODEL)
    model = ("--model=slow:build", f"--model-path={entrypoint.folder}", "--collective-timeout-s=5")
    result = entrypoint("train", *WORDS[1:-1], *model)
    assert result.code == 5
    *_, last = result.error_lines
    assert re.search(r"rank 1 is missing from .* at \S+ in \w+, where rank 0 waited until its time limit: ", last)
    assert last.endswith(f"is at {file}:11 in forward")
    stacks = result.err.partition("rank 1  process ")[2].partition(last)[0].splitlines()
    assert stacks[2] == f'    File "{file}", line 11 in forward'
    assert any("in train_epoch" in line for line in stacks)


def test_caught_collective_error_leaves_the_code_to_script(entrypoint: Entrypoint) -> None:
    text = PROGRAM.replace(
        "    dist.barrier()", "    try:\n        dist.barrier()\n    except RuntimeError:\n        os._exit(9)"
    )
    script(entrypoint.folder, "x.py", text.replace("{own_way}", "time.sleep(600)"))
    result = entrypoint(*WORDS)
    assert result.code == 9
    assert "rank 0 of this job" in result.error_lines[-1]


def test_several_missing_ranks_are_described_in_one_line() -> None:
    lost = {"extraInfo": {"lost_peer": True, "collective": {"called": "barrier", "place": "x.py:3", "how": "timeout"}}}
    waited = Failure(0, 0, 1, 1, 1, error_file=lost)
    line, _ = explain_hang([waited], {}, [1, 2])
    said = "where rank 0 waited until its time limit: rank 1: its program has ended; rank 2: its program has ended"
    assert line == f"2 ranks are missing from barrier at x.py:3, {said}"
    gone = dict.fromkeys(range(1, 10), 2**22 + 1)  # no process has such a number
    assert explain_hang([waited], gone, []) == ("", ()), "they have ended meanwhile"
    assert explain_hang([waited], {}, []) == ("", ())


WAITED = Failure(
    0, 0, 1, 1, 1,
    error_file={"extraInfo": {"collective": {"called": "barrier", "place": "/home/j\xf6rg/x.py:3", "how": "timeout"}}},
)  # fmt: skip
IN_PLACE = Whereabouts("is in barrier at x.py:3", "/home/j\\xf6rg/x.py:3", "barrier")
IN_ANOTHER = Whereabouts("is in all_reduce at x.py:9", "x.py:9", "all_reduce")
OUTSIDE = Whereabouts("is at x.py:7", "x.py:7")
AT_EXIT = Whereabouts("is at /venv/entrypoint/core/exit_delay.py:9", is_exiting=True)


@pytest.mark.parametrize(
    ("places", "missing"),
    [
        ([IN_PLACE, OUTSIDE], "rank 2 is"),
        ([IN_ANOTHER, OUTSIDE], "rank 2 is"),
        ([IN_PLACE, IN_ANOTHER], "rank 2 is"),
        ([OUTSIDE, OUTSIDE], "2 ranks are"),
        ([OUTSIDE, AT_EXIT], "rank 1 is"),
        ([IN_PLACE, AT_EXIT], ""),
    ],
)
def test_innocent_ranks_are_not_named(monkeypatch: pytest.MonkeyPatch, places: list[Whereabouts], missing: str) -> None:
    monkeypatch.setattr("entrypoint.hang.stacks.locate", lambda process: places[process - 101])
    monkeypatch.setattr("entrypoint.hang.stacks.state_of", lambda _: "S")
    line, _ = explain_hang([WAITED], {1: 101, 2: 102}, [])
    assert line.partition(" missing from")[0] == missing


def test_rank_that_ended_is_no_cause_while_others_run() -> None:
    broken = Failure(0, 0, 1, 1, 1, error_file={"extraInfo": {"collective": {"called": "send", "how": "failure"}}})
    assert explain_hang([broken], {1: os.getpid()}, [2]) == ("", ())
    assert "rank 2 is missing from send" in explain_hang([broken], {}, [2])[0]


def test_child_of_a_rank_does_not_speak_for_it(entrypoint: Entrypoint) -> None:
    child = (
        "import torch.distributed, subprocess, sys;"
        " raise RuntimeError('[gloo/transport/tcp/pair.cc:538] Connection closed by peer')"
    )
    own = (
        f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}], stderr=subprocess.DEVNULL); sys.exit(4)"
    )
    result, process = run(entrypoint, own)
    assert result.error_lines == [
        f"entrypoint: error: rank 1 of this job (local rank 1, pid {process}) failed first, with exit code 4"
    ]
