"""Two ranks that report each signal that reaches them, and ranks that an installed mpirun starts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, Result, clean_environment, launcher, script
from tests.processes import next_line

QUIET = {"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "2"}


RUN = (PYTHON, "-m", "entrypoint", "run")


# Says that it is there, then what signals reach it; a SIGTERM ends it as the test wishes.
HEARS = r"""
    import os, signal, sys, time

    rank = os.environ["RANK"]

    def heard(number, _):
        os.write(1, f"{rank} {signal.Signals(number).name}\n".encode())
        if number == signal.SIGTERM:
            {ending}

    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, heard)
    assert os.getsid(0) == os.getpid(), "the kernel gives each rank a share of its own"
    os.write(1, f"{rank} ready {os.getppid()}\n".encode())
    while True:
        time.sleep(0.05)
"""


@contextmanager
def started(
    entrypoint: Entrypoint, ending: str, *before: str, command: tuple[str, ...] = RUN, **more: str
) -> Iterator[subprocess.Popen[str]]:
    """Start two ranks that hear, with words in front of the command, and go on when both do."""
    script(entrypoint.folder, "x.py", HEARS.replace("{ending}", ending))
    process = subprocess.Popen(
        [*before, *command, "x.py"],
        cwd=entrypoint.folder,
        env={**clean_environment(), "HOME": str(entrypoint.home), **QUIET, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = sorted(next_line(process) for _ in range(2))
        assert ready == [f"{rank} ready {process.pid}\n" for rank in range(2)]
        yield process
    finally:
        process.kill()
        process.wait()


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """Return the next lines of the two ranks, sorted."""
    return sorted(next_line(process).rstrip("\n") for _ in range(count))


def run_together(
    entrypoint: Entrypoint, environs: Sequence[Mapping[str, str]], *words: str | Path, before: tuple[str, ...] = ()
) -> list[Result]:
    """Run the entrypoint once for each environment, all at the same time, as on nodes of their own."""
    command = (*before, PYTHON, "-m", "entrypoint")
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda environ: entrypoint(*words, env=environ, command=command), environs))


MPI = ("Open MPI", "HYDRA")


def run_by_mpi(entrypoint: Entrypoint, mpi: str, ranks: int, file: Path, **more: str) -> Result:
    """Run a user's script on ranks that an installed mpirun starts on this node, until all have ended."""
    names = ("mpirun.openmpi", "mpirun") if mpi == "Open MPI" else ("mpiexec.hydra", "mpirun")
    options = ("--oversubscribe", "--bind-to", "none", "--allow-run-as-root") if mpi == "Open MPI" else ()
    done = subprocess.run(
        [launcher(*names, said=mpi), *options, "-n", str(ranks), PYTHON, "-m", "entrypoint", "run", "--quiet", file],
        env={**clean_environment(), "HOME": str(entrypoint.home), "LAUNCH_OVERSUBSCRIBE": "1", **more},
        cwd=entrypoint.folder,
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT_S,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)
