"""Ranks of a user's script that never open a process group each do all of the work, and the last line says so."""

from __future__ import annotations

import pytest

from entrypoint.supervise.store_door import NEVER_MET
from tests.conftest import PYTHON, Entrypoint, launcher, needs_two_cores, script

pytestmark = [pytest.mark.launch, needs_two_cores]
SCRIPTS = {
    "alone": "print('alone')",
    "met": "import torch.distributed as group; group.init_process_group('gloo'); group.destroy_process_group()",
    "failed": "raise SystemExit(7)",
}
TWO = ("run", "--quiet", "--nproc-per-node=2")


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("alone", TWO, True),
        ("alone", (*TWO, "--launcher=torchrun", "--max-restarts=1"), True),
        ("alone", ("run", "--quiet"), False),
        ("alone", ("run", "--quiet", "--launcher=torchrun"), False),
        ("met", TWO, False),
        ("failed", TWO, False),
    ],
)
def test_ranks_that_never_met_are_told_last(
    entrypoint: Entrypoint, name: str, words: tuple[str, ...], said: bool
) -> None:
    file = script(entrypoint.folder, "x.py", SCRIPTS[name])
    result = entrypoint(*words, file)
    assert result.code == (7 if name == "failed" else 0), result.err
    assert (result.err.splitlines()[-1:] == [f"entrypoint: {NEVER_MET}"]) == said
    assert result.err.count(NEVER_MET) == said


@pytest.mark.openmpi
@pytest.mark.parametrize(("name", "count"), [("alone", 1), ("met", 0)])
def test_rank_0_of_mpirun_says_so_once(entrypoint: Entrypoint, name: str, count: int) -> None:
    mpirun = launcher("mpirun.openmpi", "mpirun", said="Open MPI")
    command = (mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", PYTHON, "-m", "entrypoint")
    result = entrypoint.succeed("run", "--quiet", script(entrypoint.folder, "x.py", SCRIPTS[name]), command=command)
    assert result.err.count(NEVER_MET) == count


def test_tune_takes_no_ranks_that_do_all_of_the_work(entrypoint: Entrypoint) -> None:
    env = {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_THREADS": "1", "TUNE_SECONDS": "0.1"}
    result = entrypoint("tune", "run", script(entrypoint.folder, "x.py", SCRIPTS["alone"]), env=env)
    assert result.code == 2
    assert result.error_lines == [
        "entrypoint: error: tune: no plan gave a rate: its ranks open no process group, so each does all of the work"
    ]
