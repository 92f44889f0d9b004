"""Throughput and the launcher's own cost for a growing number of ranks: `make bench-scaling`.

First table: the trainer on synthetic images of 3x32x32 in memory, fp32, with a global batch of 128.
Variants are one rank with one core, one rank with all cores, and one rank per core.
They alternate ROUNDS (5) times; results are medians and range of the images per second.
Efficiency is the ranks' rate relative to one rank with all cores, and to the same number of single cores.
Second table: `entrypoint run` of a script that only prints its start time.
It has 1 to 64 ranks on this machine, also more than there are cores.
Columns: seconds of `entrypoint plan` alone, and until the first line of the first and of the last rank.
The last column is the memory of all processes that are not ranks. Results are medians of ROUNDS.
Claim: nothing grows faster than the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.book.experiments import Variant
from benchmarks.book.measure import alternate
from benchmarks.record import Recording, parse_options, recording

ENTRYPOINT = (sys.executable, "-m", "entrypoint")
MODELS = {"cnn": 150, "resnet18": 40, "speednet-half": 60}
RANKS = (1, 2, 4, 8, 16, 32, 64)


def throughput(rounds: int, record: Recording) -> None:
    """Print the first table."""
    cores = len(os.sched_getaffinity(0))
    one, every, ranks = "1 rank x 1 core", f"1 rank x {cores} cores", f"{cores} ranks x 1 core"
    variants = (
        Variant(one, {"LAUNCH_THREADS": "1"}),
        Variant(every),
        Variant(ranks, {"LAUNCH_NPROC_PER_NODE": str(cores)}),
    )
    print(f"{'':<16}{'':<20}{'images/s':>9}{'range':>14}{'of all cores':>14}{'of single cores':>17}")
    for model, steps in MODELS.items():
        common = {
            "TRAIN_DATASET": "synthetic", "TRAIN_SYNTHETIC_IMAGES": "12800", "TRAIN_MODEL": model,
            "TRAIN_BATCH_SIZE": "128", "TRAIN_STEPS": str(steps), "TRAIN_LR": "0.001",
        }  # fmt: skip
        seen = alternate(variants, common, rounds)
        table = record.table(model, "images/s", every)
        for name, measured in seen.items():
            if measured.refusal:
                table.missing[name] = measured.refusal
                print(f"{model:<16}{name:<20}{measured.refusal}")
                continue
            table.add(name, *measured.speeds)
            shares = (measured.speed / seen[every].speed, measured.speed / seen[one].speed / cores)
            print(
                f"{model:<16}{name:<20}{measured.speed:>9,.0f}{table.range(name):>14}"
                f"{shares[0]:>14.2f}{shares[1] if name != one else 1:>17.2f}",
                flush=True,
            )


def memory_mb(process: int) -> float:
    """Return the resident memory of a process and its descendants in MB, without ranks."""
    environ = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    own = 0.0
    if not any(one.startswith(b"LOCAL_RANK=") for one in environ):
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
        own = int(fields.get("VmRSS", "0 kB").split()[0]) / 1024
    tasks = Path(f"/proc/{process}/task").glob("*/children")
    return own + sum(memory_mb(int(child)) for task in tasks for child in task.read_text().split())


def start(ranks: int, script: str) -> tuple[float, float, float, float]:
    """Return the seconds of planning, and until the first and the last rank's line, and the launcher's MB."""
    flags = (f"--nproc-per-node={ranks}", "--oversubscribe=1", "--quiet=1")
    environ = {**os.environ, "LAUNCH_TUNING_STORE": "off"}
    started = time.time()
    subprocess.run([*ENTRYPOINT, "plan", "run", *flags, script], env=environ, capture_output=True, check=True)
    planned, started = time.time() - started, time.time()
    with subprocess.Popen(
        [*ENTRYPOINT, "run", *flags, script], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        clocks = [float(process.stdout.readline()) for _ in range(ranks)]
        memory = memory_mb(process.pid)
        process.communicate()
    return planned, min(clocks) - started, max(clocks) - started, memory


def launches(rounds: int, script: str, record: Recording) -> None:
    """Print the second table."""
    print(f"\n{'ranks':>6}{'plan s':>9}{'first line s':>14}{'last line s':>13}{'a rank more, s':>16}{'memory MB':>11}")
    titles = (("plan alone", "s"), ("first line", "s"), ("last line", "s"), ("memory", "MB"))
    tables = [record.table(title, unit, "1 rank") for title, unit in titles]
    before, last = 0, 0.0
    for ranks in RANKS:
        name = f"{ranks} rank{'s' * (ranks > 1)}"
        for _ in range(rounds):
            for table, value in zip(tables, start(ranks, script), strict=True):
                table.add(name, value)
        planned, first, end, memory = (table.median(name) for table in tables)
        print(
            f"{ranks:>6}{planned:>9.2f}{first:>14.2f}{end:>13.2f}"
            f"{(end - last) / (ranks - before):>16.3f}{memory:>11.0f}",
            flush=True,
        )
        before, last = ranks, end


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(prog="make bench-scaling")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("throughput", "launches"))
    args = parse_options(parser)
    with recording("scaling", args, args.rounds) as record:
        if args.only != "launches":
            throughput(args.rounds, record)
        if args.only != "throughput":
            script = Path(__file__).with_name("print_start_time.py")
            launches(args.rounds, str(script), record)


if __name__ == "__main__":
    main()
