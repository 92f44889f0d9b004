"""What the plan is worth: `make bench-plan`.

Conditions: a user's script (benchmarks/plan_value/program.py, the book's CNN, batch 64 over all ranks, 60 steps after
warm-up), on the machine as it is, under a quota of one CPU, behind a mask of one CPU, with a busy process on every
CPU, and on one. Ours is `entrypoint run` with nothing set, and with --nproc-per-node=2; peers are torchrun, accelerate
launch and torch.backends.xeon.run_cpu with one and two ranks where they can. The sweep is every combination of ranks,
threads, OpenMP runtime, wait policy and allocator that can be had, once each; its best FINALISTS (5) then run in turns
with all others, ROUNDS (5) times. Medians and range of images a second; ratios are to ours with nothing set. A finalist
that the plan itself would have taken is marked: its ratio says how far chance goes. So is who runs on CPUs that it was
not given, which is no advantage but another's loss. Our trainer, which may choose its number of ranks, runs in the same
turns on as large a model and batch, for 313 steps; its ratios are to itself with nothing set.
Claim: ours within 5 % of the sweep's best, and never behind a peer that keeps to what it was given. Where every CPU has
a busy process the sweep's best is two ranks, which our trainer takes by itself; a script's number of ranks is chosen
by a user or `tune`.
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
from entrypoint.core.console import last_error_line
from entrypoint.machine.detect import detect_machine

PYTHON, PROGRAM = sys.executable, str(Path(__file__).with_name("program.py"))
MODULE = (PYTHON, "-m")
OURS, SAME, FINALISTS, LIMIT_S = "ours", " (the same)", 5, 300
QUIET = {"LAUNCH_QUIET": "1", "LAUNCH_TUNING_STORE": "off"}
# Long enough for the trainer to find ranks worth their start.
TRAINING = {
    **{"TRAIN_DATASET": "synthetic", "TRAIN_MODEL": "cnn", "TRAIN_STEPS": "313", "TRAIN_BATCH_SIZE": "64"},
    **{"TRAIN_TENSORBOARD": "0", "TRAIN_CHECKPOINT_EVERY": "0"},
}


@dataclass
class Runner:
    """A command, what is set for it, and the rates that it gave; `reported` finds them, and how many CPUs it had."""

    name: str
    command: Sequence[str]
    settings: Mapping[str, str] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    problem: str = ""
    cpus: int = 0
    reported: str = r"rate ([\d.,]+) on (\d+) CPUs"

    def run(self, words: Sequence[str]) -> None:
        """Run once behind these words; what fails is not tried again."""
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

    def plans(self, words: Sequence[str]) -> list[Any]:
        """Return what is planned of one of ours, behind these words."""
        command = [*self.command[:3], "plan", "--json", *self.command[3:]]
        environ = {**os.environ, **self.settings}
        done = subprocess.run([*words, *command], env=environ, capture_output=True, text=True, check=True)
        plan = json.loads(done.stdout)
        return [plan[name] for name in ("ranks", "binding", "environment")]

    @property
    def median(self) -> float:
        """The median of the rates, nothing where there are none."""
        return statistics.median(self.rates) if self.rates else 0.0


def ours(name: str, settings: Mapping[str, str]) -> Runner:
    """Return the entrypoint with settings."""
    return Runner(name, (*MODULE, "entrypoint", "run", PROGRAM), {**QUIET, **settings})


def trainers(folder: str) -> list[Runner]:
    """Return our trainer with nothing set, and with each number of ranks; what it leaves is in the folder."""
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


def contestants() -> list[Runner]:
    """Return ours and what people type today."""
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
            # On a CPU it starts one process of fewer threads, whatever number is asked for, without a word.
            for n, name in ((1, "accelerate, 1 rank"), (2, "accelerate, 2 asked, 1 started"))
        ),
        Runner("xeon.run_cpu", (*MODULE, "torch.backends.xeon.run_cpu", "--ninstances=1", PROGRAM)),
        Runner("python", (PYTHON, PROGRAM)),
    ]


def sweep() -> list[Runner]:
    """Return the entrypoint with every combination of settings that can be had here."""
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


def compare(scenario: str, rounds: int) -> None:
    """Sweep once, let the best run in turns with the others, and print the scenario's table."""
    plain, *others = contestants()
    with SCENARIOS[scenario]() as words, TemporaryDirectory() as folder:
        every, training = sweep(), trainers(folder)
        for one in every:
            one.run(words)
        best = sorted(every, key=lambda one: one.median, reverse=True)[:FINALISTS]
        for one in best:
            one.rates.clear()  # the best of many draws was lucky too
            if one.plans(words) == plain.plans(words):
                one.name += SAME
        runners = [plain, *others, *best]
        for _ in range(rounds):
            for one in (*runners, *training):
                if not one.problem:
                    one.run(words)
        given = int(subprocess.run([*words, "nproc"], capture_output=True, text=True, check=True).stdout)
    left_out = sum(bool(one.problem) for one in every)
    print(f"\n{scenario}: {len(every)} swept, {left_out} of them refused")
    print(f"{'':<40}{'images/s':>9}{'range':>14}{'to ours':>9}")
    show(runners, given)
    show(training, given)


def show(runners: Sequence[Runner], given: int) -> None:
    """Print a row for each, next to the first; `given` is the number of CPUs that the scenario gives."""
    base = runners[0].median
    for one in runners:
        reported = f"{min(one.rates):,.0f}-{max(one.rates):,.0f}" if one.rates else one.problem
        ratio = one.median / base if base else 0
        escaped = f"  takes {one.cpus} CPUs where {given} is given" if one.cpus > given else ""
        print(f"{one.name:<40}{one.median:>9,.0f}{reported:>14}{ratio:>9.2f}{escaped}", flush=True)


def main() -> None:
    """Print a table for each scenario of the machine."""
    parser = argparse.ArgumentParser(prog="make bench-plan")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help="with commas")
    asked = parser.parse_args()
    for scenario in asked.scenarios.split(","):
        try:
            compare(scenario, asked.rounds)
        except OSError as error:
            print(f"\n{scenario}: cannot be made here: {error}")


if __name__ == "__main__":
    main()
