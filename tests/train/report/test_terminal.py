"""Ctrl-C reaches all that runs at a terminal, SIGTERM the entrypoint: a run saves, anyone who started its ranks.

So it does where the terminal, or anyone who reads what it prints, goes away.
"""

from __future__ import annotations

import os
import signal

import pytest

from entrypoint.core.errors import ExitCode
from tests.conftest import PYTHON, Entrypoint, launcher, needs_two_cores, script
from tests.terminals import terminal
from tests.train.given import SMALL
from tests.train.started import Started

pytestmark = pytest.mark.launch
ENDLESS = {**SMALL, "TRAIN_EPOCHS": "100000", "TRAIN_TENSORBOARD": "0", "TRAIN_RUN_NAME": "run"}
TRAIN = (PYTHON, "-m", "entrypoint", "train")
HOSTS = ("--hosts", "localhost:2")


def environment(entrypoint: Entrypoint, names: tuple[str, ...], said: str) -> dict[str, str]:
    """Return what a run without an end prints, the mpirun of these names first on its PATH."""
    bin_folder = entrypoint.folder / "bin"
    bin_folder.mkdir()
    if names:
        mpirun = script(bin_folder, "mpirun", f'#!/bin/sh\nexec {launcher(*names, said=said)} "$@"\n')
        mpirun.chmod(0o755)
    return {
        **ENDLESS, "HOME": str(entrypoint.home), "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }  # fmt: skip


WAYS = [
    pytest.param((), "", ("--nproc-per-node", "1"), id="one rank"),
    pytest.param((), "", ("--nproc-per-node", "2"), marks=needs_two_cores, id="agent"),
    pytest.param(
        ("mpirun.openmpi", "mpirun"),
        "Open MPI",
        HOSTS,
        marks=(pytest.mark.openmpi, needs_two_cores, pytest.mark.slow),
        id="Open MPI",
    ),
]
HYDRA = pytest.param(
    ("mpiexec.hydra",), "HYDRA", HOSTS, marks=(pytest.mark.hydra, needs_two_cores, pytest.mark.slow), id="hydra"
)


@pytest.mark.slow_except("one rank")
@pytest.mark.parametrize(("names", "said", "words"), [*WAYS, HYDRA])
@pytest.mark.parametrize("typed", [True, False], ids=["Ctrl-C", "SIGTERM"])
def test_terminal_stop_saves_and_reports_once(
    entrypoint: Entrypoint, names: tuple[str, ...], said: str, words: tuple[str, ...], typed: bool
) -> None:
    with terminal(entrypoint.folder, (*TRAIN, *words), environment(entrypoint, names, said)) as screen:
        screen.wait_for(b"epoch 2/100000")
        if typed:
            os.write(screen.terminal, b"\x03")
        else:
            os.kill(screen.process, signal.SIGTERM)
        code = screen.ended()
    assert code == ExitCode.PREEMPTED, screen.said.decode()
    assert screen.said.count(b"entrypoint: preempted: stopped by SIG") == 1, screen.said.decode()
    assert list((entrypoint.folder / "runs/run/checkpoint").glob("step-*"))


@pytest.mark.slow_except("one rank")
@pytest.mark.parametrize(("names", "said", "words"), WAYS)  # hydra ends all when it can print no more
def test_closed_terminal_saves_and_ends_run(
    entrypoint: Entrypoint, names: tuple[str, ...], said: str, words: tuple[str, ...]
) -> None:
    with terminal(entrypoint.folder, (*TRAIN, *words), environment(entrypoint, names, said)) as screen:
        screen.wait_for(b"epoch 2/100000")
    _, status = os.waitpid(screen.process, 0)
    assert os.waitstatus_to_exitcode(status) == ExitCode.PREEMPTED
    assert list((entrypoint.folder / "runs/run/checkpoint").glob("step-*"))


@needs_two_cores
def test_closed_output_pipe_saves_and_ends_run(entrypoint: Entrypoint) -> None:
    run = Started(entrypoint, ENDLESS | {"LAUNCH_NPROC_PER_NODE": "2"})
    run.wait_for("epoch 2/100000")
    assert run.process.stdout is not None
    run.process.stdout.close()
    _, err = run.ended_with(ExitCode.PREEMPTED)
    assert err.count("\n") == err.count("entrypoint: preempted: stopped by ") == 1, err
    saved = int(err.partition(": step ")[2].split()[0])
    assert (entrypoint.folder / f"runs/run/checkpoint/step-{saved:09}").exists()


def test_run_goes_on_where_a_full_disk_takes_no_more_lines(entrypoint: Entrypoint) -> None:
    line = f'"{PYTHON}" -m entrypoint train --quiet --epochs=2 > /dev/full'
    result = entrypoint("-c", line, env=ENDLESS, command=("sh",))
    assert result.succeeded().err.count("standard output: cannot be written (No space left on device)") == 1
    assert (entrypoint.folder / "runs/run/summary.json").exists()
