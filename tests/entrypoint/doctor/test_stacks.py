"""What ranks do, seen from outside while they run: `entrypoint stacks`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.conftest import PYTHON, Entrypoint, clean_environment
from tests.entrypoint.doctor.waiting_ranks import RUN, started
from tests.processes import has_ended, killed_at_end, state, wait_until

pytestmark = pytest.mark.launch

# Rank 0 hangs in a collective that rank 1 leaves out.
LEFT_OUT = """
    import os, threading, time
    import torch
    import torch.distributed as dist

    def note():
        file = f"ready{os.environ['RANK']}"
        open(file + ".new", "w").write(str(os.getpid()))
        os.rename(file + ".new", file)

    def leave_out():
        note()
        time.sleep(600)

    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    dist.init_process_group("gloo")
    if os.environ["RANK"] == "1":
        leave_out()
    threading.Timer(0.5, note).start()
    dist.all_reduce(torch.ones(1))
"""


def test_stacks_of_hanging_ranks_name_collective(entrypoint: Entrypoint) -> None:
    with started(entrypoint, LEFT_OUT, *RUN) as pids:
        for _ in range(2):  # each time only the stacks of that moment
            found = {one["process"]: one for one in json.loads(entrypoint("stacks", "--json").out)}
            waiting, other = (found[pid]["stacks"] for pid in pids)
            assert waiting.count(", line 20 in <module>") == 1
            assert "all_reduce" in waiting
            assert "leave_out" in other
            assert "all_reduce" not in other
        result = entrypoint("stacks", str(pids[1]))
        assert (result.code, result.err) == (0, "")
        assert result.out.startswith(f"rank 1  process {pids[1]}")
        assert all(state(pid) == "S" for pid in pids), "both still wait"


def test_stopped_rank_is_named_and_not_signalled(entrypoint: Entrypoint) -> None:
    with started(entrypoint, LEFT_OUT, *RUN) as pids:
        os.kill(pids[1], signal.SIGSTOP)
        wait_until(lambda: state(pids[1]) == "T")
        result = entrypoint("stacks", *map(str, pids))
        waiting, _, stopped = result.out.partition("\n\n")
        assert "all_reduce" in waiting
        assert stopped == (
            f"rank 1  process {pids[1]}  stopped (SIGSTOP): no stack can come. `kill -CONT {pids[1]}` lets it go on.\n"
        )
        os.kill(pids[1], signal.SIGCONT)
        wait_until(lambda: state(pids[1]) == "S")
        assert "leave_out" in entrypoint("stacks", str(pids[1])).out


def test_rank_that_is_no_python_lives_on(entrypoint: Entrypoint) -> None:
    text = LEFT_OUT.replace("time.sleep(600)\n\n    thr", 'os.execvp("sleep", ["sleep", "600"])\n\n    thr')
    assert text != LEFT_OUT
    with started(entrypoint, text, *RUN) as pids:
        wait_until(lambda: Path(f"/proc/{pids[1]}/comm").read_text() == "sleep\n")
        result = entrypoint("stacks", str(pids[1]))
        assert "without the handler for stacks" in result.out
        assert state(pids[1]) == "S", "the signal would have ended it"


def test_stacks_of_run_folder_are_its_ranks(entrypoint: Entrypoint) -> None:
    env = {**clean_environment(), "HOME": str(entrypoint.home), "LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0"}
    words = ("train", "--nproc-per-node=2", "--oversubscribe=1", "--dataset=digits", "--epochs=10000", "--run-name=two")
    folder = entrypoint.folder / "runs/two"
    with killed_at_end([PYTHON, "-m", "entrypoint", *words], cwd=entrypoint.folder, env=env) as job:
        wait_until(lambda: (folder / "ranks.json").exists() or job.poll() is not None)
        result = entrypoint.succeed("stacks", "--json", folder)
        found = json.loads(result.out)
    assert [one["rank"] for one in found] == [0, 1]
    assert all("train/__main__.py" in one["stacks"] for one in found)
    wait_until(lambda: all(has_ended(one["process"]) for one in found))
    assert "no rank of this run runs on" in entrypoint.error_line("stacks", folder)
