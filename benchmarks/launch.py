"""Seconds from a command to the first line of a trivial script: the entrypoint compared with other launchers.

Claim: for one rank, the entrypoint adds at most 0.15 s to a bare python.
Claim: it starts two ranks in a quarter of torchrun's time.
Variants alternate in one process; results are medians and spread of ROUNDS.
The script prints the clock, so its exit does not count.
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
from pathlib import Path

from benchmarks.record import parse_options, recording
from benchmarks.tables import Table

# One write, so that the lines of two ranks do not mix.
SCRIPT = "import os, time; os.write(1, f'{time.time()}\\n'.encode())"
PYTHON = sys.executable
BIN = Path(PYTHON).parent

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


def seconds_to_first_line(command: list[str], script: Path) -> float:
    """Return the seconds from the start of a command to the first line of its script."""
    environ = {**os.environ, "LAUNCH_QUIET": "1"}
    started = time.time()
    done = subprocess.run([*command, str(script)], env=environ, capture_output=True, text=True, check=True, timeout=120)
    clocks = [float(line) for line in done.stdout.splitlines() if line.replace(".", "", 1).isdigit()]
    return min(clocks) - started


def measure(variants: dict[str, tuple[str, list[str]]], script: Path, rounds: int, into: Table) -> None:
    """Add the seconds of each installed variant; variants alternate, and the first round is warm-up."""
    there = {name: command for name, (module, command) in variants.items() if importlib.util.find_spec(module)}
    into.missing |= dict.fromkeys(set(variants) - set(there), "not installed")
    for round_number in range(rounds + 1):
        for name, command in there.items():
            value = seconds_to_first_line(command, script)
            if round_number:
                into.add(name, value)
    print(into.text(), flush=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="make bench-launch", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    args = parse_options(parser)
    with tempfile.TemporaryDirectory() as folder, recording("launch", args, args.rounds) as record:
        script = Path(folder, "trivial.py")
        script.write_text(SCRIPT)
        measure(ONE_RANK, script, args.rounds, record.table("one rank", "s", "python"))
        measure(TWO_RANKS, script, args.rounds, record.table("two ranks", "s", "torchrun"))


if __name__ == "__main__":
    main()
