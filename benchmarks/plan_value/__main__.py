"""The value of the plan: `make bench-plan`.

Program: a user's script (benchmarks/plan_value/program.py) with the book's CNN.
It runs 60 steps after warm-up, with batch 64 over all ranks.
Scenarios: the machine as it is, a quota of one CPU, an affinity mask of one CPU.
Two more have a busy process on every CPU, and on one CPU.
Ours is `entrypoint run` with its defaults, and with --nproc-per-node=2.
Peers are torchrun, accelerate launch and torch.backends.xeon.run_cpu, with one and two ranks where possible.
The sweep is every available combination of ranks, threads, OpenMP runtime, wait policy and allocator, once each.
Its best FINALISTS (5) then alternate with all others ROUNDS (5) times.
Results are medians and range of the images per second; ratios are relative to ours with its defaults.
A finalist with the same plan as ours is marked; its ratio shows the noise.
A runner on CPUs that it was not given is marked too, because it takes them from others.
Our trainer can choose its number of ranks. It runs in the same rounds, with the same model and batch, for 313 steps.
Its ratios are relative to itself with its defaults.
Claim: ours is within 5 % of the sweep's best, and never slower than a peer that uses only the CPUs it was given.
With a busy process on every CPU the sweep's best is two ranks, which our trainer chooses by itself.
For a script, the user or `tune` chooses the number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.plan_value.scenarios import SCENARIOS
from benchmarks.record import Recording, parse_options, recording
from benchmarks.tables import Table
from entrypoint.core.console import last_error_line
from entrypoint.machine.detect import detect_machine

PYTHON, PROGRAM = sys.executable, str(Path(__file__).with_name("program.py"))
MODULE = (PYTHON, "-m")
OURS, SAME, FINALISTS, LIMIT_S = "ours", " (the same)", 5, 300
QUIET = {"LAUNCH_QUIET": "1", "LAUNCH_TUNING_STORE": "off"}
# Enough steps for the trainer to choose several ranks.
TRAINING = {
    **{"TRAIN_DATASET": "synthetic", "TRAIN_MODEL": "cnn", "TRAIN_STEPS": "313", "TRAIN_BATCH_SIZE": "64"},
    **{"TRAIN_TENSORBOARD": "0", "TRAIN_CHECKPOINT_EVERY": "0"},
}


@dataclass
class Runner:
    """A command, its settings, and its rates; `reported` is the pattern of the rate and the number of CPUs."""

    name: str
    command: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    problem: str = ""
    cpus: int = 0
    reported: str = r"rate ([\d.,]+) on (\d+) CPUs"

    def run(self, words: Sequence[str]) -> None:
        """Run once with these words before the command; a command that fails is not run again."""
        environ = {**os.environ, **self.settings}
        done = subprocess.run(
            [*words, *self.command], env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        found = re.search(self.reported, done.stdout)
        if found:
            self.rates.append(float(found[1].replace(",", "")))
            self.cpus = max(map(int, found.groups()[1:]), default=0)
        else:
            self.problem = last_error_line(done.stderr, f"ended with {done.returncode}")

    def plan_parts(self, words: Sequence[str]) -> list[Any]:
        """Return the plan of one of ours, with these words before the command."""
        command = [*self.command[:3], "plan", "--json", *self.command[3:]]
        environ = {**os.environ, **self.settings}
        done = subprocess.run([*words, *command], env=environ, capture_output=True, text=True, check=True)
        plan = json.loads(done.stdout)
        return [plan[name] for name in ("ranks", "binding", "environment")]

    def add_to(self, table: Table) -> None:
        """Add the rates to a table, or the reason why there are none."""
        if self.rates:
            table.add(self.name, *self.rates)
        else:
            table.missing[self.name] = self.problem

    @property
    def median(self) -> float:
        """The median of the rates, 0 if there are none."""
        return statistics.median(self.rates) if self.rates else 0.0


def ours(name: str, settings: Mapping[str, str]) -> Runner:
    """Return the entrypoint with settings."""
    return Runner(name, (*MODULE, "entrypoint", "run", PROGRAM), {**QUIET, **settings})


def trainers(folder: str) -> list[Runner]:
    """Return our trainer with its defaults and with each number of ranks; its files are in the folder."""
    command, reported = (*MODULE, "entrypoint", "train"), r"([\d.,]+) images/s, the whole"
    settings = {**QUIET, **TRAINING, "TRAIN_OUTPUT_DIR": folder}
    return [
        Runner(f"our trainer{name}", command, {**settings, **ranks}, reported=reported)
        for name, ranks in (
            ("", {}),
            (", 1 rank", {"LAUNCH_NPROC_PER_NODE": "1"}),
            (", 2 ranks", {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1"}),
        )
    ]


def ours_and_peers() -> list[Runner]:
    """Return ours and the commands that users run today."""
    accelerate, torchrun = (*MODULE, "accelerate.commands.launch", "--cpu"), (*MODULE, "torch.distributed.run")
    return [
        ours(OURS, {}),
        ours(f"{OURS}, 2 ranks", {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1"}),
        *(
            Runner(f"torchrun, {n} rank{'s' * (n > 1)}", (*torchrun, "--standalone", f"--nproc-per-node={n}", PROGRAM))
            for n in (1, 2)
        ),
        *(
            Runner(name, (*accelerate, f"--num_processes={n}", PROGRAM))
            # On a CPU it starts one process with fewer threads for any number, without a message.
            for n, name in ((1, "accelerate, 1 rank"), (2, "accelerate, 2 asked, 1 started"))
        ),
        Runner("xeon.run_cpu", (*MODULE, "torch.backends.xeon.run_cpu", "--ninstances=1", PROGRAM)),
        Runner("python", (PYTHON, PROGRAM)),
    ]


def sweep() -> list[Runner]:
    """Return the entrypoint with every combination of settings that is available here."""
    machine = detect_machine(affinity=frozenset(os.sched_getaffinity(0)))
    cores = len(os.sched_getaffinity(0))
    runtimes = ["gnu"] + ["intel"] * bool(machine.library("intel").path)
    allocators = ["system"] + [name for name in ("tcmalloc", "jemalloc") if machine.library(name).path]
    waits = {"as planned": {}, "active": {"OMP_WAIT_POLICY": "active"}, "passive": {"OMP_WAIT_POLICY": "passive"}}
    return [
        ours(
            f"{ranks} x {threads}, {runtime}, {wait}, {allocator}",
            {
                "LAUNCH_NPROC_PER_NODE": str(ranks), "LAUNCH_THREADS": str(threads), "LAUNCH_OPENMP": runtime,
                "LAUNCH_ALLOCATOR": allocator, "LAUNCH_OVERSUBSCRIBE": "1", **waits[wait],
            },
        )
        for ranks, threads, runtime, wait, allocator in product(
            sorted({1, cores}), sorted({1, cores}), runtimes, waits, allocators
        )
    ]  # fmt: skip


def compare(scenario: str, rounds: int, record: Recording) -> None:
    """Run the sweep once, then the best alternating with the others, and print the scenario's table."""
    plain, *others = ours_and_peers()
    with SCENARIOS[scenario]() as words, TemporaryDirectory() as folder:
        every, training = sweep(), trainers(folder)
        swept = record.table(f"{scenario}, the sweep", "images/s", detail=True)
        for one in every:
            one.run(words)
            one.add_to(swept)
        best = sorted(every, key=lambda one: one.median, reverse=True)[:FINALISTS]
        for one in best:
            one.rates.clear()  # the best of many samples is biased
            if one.plan_parts(words) == plain.plan_parts(words):
                one.name += SAME
        runners = [plain, *others, *best]
        for _ in range(rounds):
            for one in (*runners, *training):
                if not one.problem:
                    one.run(words)
        given = int(subprocess.run([*words, "nproc"], capture_output=True, text=True, check=True).stdout)
    left_out = sum(bool(one.problem) for one in every)
    print(f"\n{scenario}: {len(every)} swept, {left_out} of them refused")
    show(runners, record.table(scenario, "images/s", OURS), given)
    show(training, record.table(f"{scenario}, our trainer", "images/s", training[0].name), given)


def show(runners: Sequence[Runner], table: Table, given: int) -> None:
    """Add all to the table, and print it; `given` is the number of CPUs that the scenario gives."""
    for one in runners:
        one.add_to(table)
    print(table.text())
    for one in runners:
        if one.cpus > given:
            print(f"{one.name} takes {one.cpus} CPUs where {given} is given", flush=True)


def main() -> None:
    """Print a table for each scenario of the machine."""
    parser = argparse.ArgumentParser(prog="make bench-plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="with commas")
    args = parse_options(parser)
    with recording("plan", args, args.rounds) as record:
        for scenario in args.scenarios.split(","):
            try:
                compare(scenario, args.rounds, record)
            except OSError as error:
                print(f"\n{scenario}: cannot be made here: {error}")


if __name__ == "__main__":
    main()
