"""Seconds from a command to the first line of a trivial script: the entrypoint compared with other launchers.

The last table is the shortest training, one step with the digits, compared with a process that only imports torch.
Claim: for one rank, the entrypoint adds at most 0.12 s to a bare python, and two ranks start in 0.2 s.
Claim: it starts two ranks in a quarter of torchrun's time.
Claim: the shortest training takes at most 0.4 s more than the import of torch.
Variants alternate in one process; results are medians and spread of ROUNDS.
The script prints the clock, so its exit does not count. That of a training counts.
Each program finds its modules compiled, as it does where it is installed: the first round writes what is missing.
A launcher that is not installed is a row with that reason. The benchmark prints a table and asserts nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.runner import NotMeasuredError, Table, parse_options, recording, take_turns

# One write, so that the lines of two ranks do not mix.
SCRIPT = "import os, time; os.write(1, f'{time.time()}\\n'.encode())"
PYTHON = sys.executable
BIN = Path(PYTHON).parent
LIMIT_S = 120

# name → (required module, command before the script)
ONE_RANK: dict[str, tuple[str, list[str]]] = {
    "python": ("sys", [PYTHON]),
    "entrypoint": ("entrypoint", [str(BIN / "entrypoint"), "run"]),
    "torchrun": ("torch", [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=1"]),
    "xeon.run_cpu": ("torch", [PYTHON, "-m", "torch.backends.xeon.run_cpu", "--ninstances", "1"]),
    "accelerate launch": ("accelerate", [PYTHON, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]),
}
TWO_RANKS: dict[str, tuple[str, list[str]]] = {
    "torchrun": ("torch", [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2"]),
    "entrypoint": ("entrypoint", [str(BIN / "entrypoint"), "run", "--nproc-per-node=2"]),
}
TRAINING = ("train", "--dataset=digits", "--steps=1", "--tensorboard=0")
SHORTEST: dict[str, tuple[str, list[str]]] = {
    "import torch": ("torch", [PYTHON, "-c", "import torch"]),
    "entrypoint train": ("entrypoint", [str(BIN / "entrypoint"), *TRAINING]),
}


def run(command: list[str], folder: Path) -> str:
    """Run a command in a folder, and return its output."""
    environ = {**os.environ, "LAUNCH_QUIET": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True, timeout=LIMIT_S)
    return done.stdout


def seconds_to_first_line(command: list[str], folder: Path) -> float:
    """Return the seconds from the start of a command to the first line of its script, `trivial.py` in a folder."""
    started = time.time()
    lines = run([*command, "trivial.py"], folder).splitlines()
    return min(float(line) for line in lines if line.replace(".", "", 1).isdigit()) - started


def seconds_of_all(command: list[str], folder: Path) -> float:
    """Return the seconds that a command takes, until it has ended."""
    started = time.perf_counter()
    run(command, folder)
    return time.perf_counter() - started


def measure(
    variants: dict[str, tuple[str, list[str]]],
    folder: Path,
    rounds: int,
    into: Table,
    seconds: Callable[[list[str], Path], float] = seconds_to_first_line,
) -> None:
    """Add the seconds of each installed variant; the first round is warm-up."""
    works = {name: partial(seconds_of_variant, *variant, folder, seconds) for name, variant in variants.items()}
    take_turns(works, [into], rounds, warm_up=True)


def seconds_of_variant(
    module: str, command: list[str], folder: Path, seconds: Callable[[list[str], Path], float]
) -> tuple[float]:
    """Return the seconds of one start; raises `NotMeasuredError` for a launcher that is not installed."""
    if not importlib.util.find_spec(module):
        raise NotMeasuredError("not installed")
    return (seconds(command, folder),)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(prog="make bench-launch", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    args = parse_options(parser)
    with tempfile.TemporaryDirectory() as scratch, recording("launch", args) as record:
        folder = Path(scratch)
        (folder / "trivial.py").write_text(SCRIPT)
        measure(ONE_RANK, folder, args.rounds, record.table("one rank", "s", "python"))
        measure(TWO_RANKS, folder, args.rounds, record.table("two ranks", "s", "torchrun"))
        shortest = record.table("the shortest training", "s", "import torch")
        measure(SHORTEST, folder, args.rounds, shortest, seconds_of_all)


if __name__ == "__main__":
    main()
