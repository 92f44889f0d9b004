"""The book's result tables, measured on this machine: `make book`, or `make book-quick` for a part of the data.

Our own loop and recipe train the book's CNN on real CIFAR-10 images (CIFAR10_IMAGES, or downloaded).
The variants of an experiment alternate, with one seed per round; results are medians and spread.
Accuracy and training seconds are those of one run of all epochs.
Experiments with equal settings share that run. Images per second, first step and spread are those of short runs.
The book's figures are those that it prints, of other machines and of its models: Fashion-MNIST in chapter 2,
DenseNet121 in chapter 3, EfficientNet in chapters 7, 10 and 11.
There is no conclusion on speed without five short runs of each variant, or if other processes took the CPUs.
So ratios are comparable, seconds are not. What this machine lacks is a row with the reason.
The benchmark prints a line per experiment and asserts nothing.
Results are stored in results.json next to the report; a repeated command measures only missing ones.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from benchmarks.book.experiments import EXPERIMENTS, Experiment
from benchmarks.book.measure import Measured, cifar10_settings, first_images, run_to_the_end, with_speeds
from benchmarks.book.report import Result, as_html, as_markdown
from benchmarks.book.stored_results import StoredResults
from benchmarks.runner import Recording, parse_options, recording
from entrypoint.machine.detect import describe_machine, detect_machine

# Images per class, epochs, rounds. Without rounds, the complete runs give the speed too.
QUICK, FULL = (100, 2, 0), (None, 10, 5)
SHORT_STEPS, FEW_STEPS = 100, 15


def main() -> None:
    """Run all experiments, or the named ones, and write the report after each."""
    parser = argparse.ArgumentParser(prog="make book")
    parser.add_argument("--quick", action="store_true", help="a few images, two epochs, one round")
    parser.add_argument("--epochs", type=int, help="epochs of the runs that measure accuracy")
    parser.add_argument("--rounds", type=int, help="number of short runs per variant that measure its speed")
    parser.add_argument("--only", default="", help="chapters with commas: 2,9.2")
    parser.add_argument("--out", type=Path, default=Path("book"), help="folder of book.html and book.md")
    args = parse_options(parser)
    each, epochs, rounds = QUICK if args.quick else FULL
    epochs, rounds = args.epochs or epochs, rounds if args.rounds is None else args.rounds
    args.out.mkdir(parents=True, exist_ok=True)
    conditions = describe_conditions(each, epochs, rounds)
    results: list[Result] = []
    started = time.monotonic()
    stored = StoredResults(args.out / "results.json", conditions)
    with (
        cifar10_settings(each) as data,
        first_images(data, None if each else QUICK[0]) as few,
        recording("book", args) as record,
    ):
        for experiment in EXPERIMENTS:
            wanted = not args.only or experiment.chapter in args.only.split(",")
            if stored.is_missing(experiment) and not wanted:
                continue
            if stored.is_missing(experiment):
                common = few if experiment.few else data
                seen = run_to_the_end(experiment.variants, {**common, "TRAIN_EPOCHS": str(epochs)}, stored.runs())
                if rounds:
                    steps = FEW_STEPS if experiment.few else SHORT_STEPS
                    seen = with_speeds(seen, experiment.variants, common, steps, rounds)
                stored.add(experiment, seen)
                add_tables(record, experiment, seen)
            results.append(Result(experiment, stored.results(experiment)))
            spent = time.monotonic() - started
            print(f"{spent:5.0f} s  {experiment.chapter:4} {experiment.title}: {results[-1].conclusion}", flush=True)
            (args.out / "book.md").write_text(as_markdown(results, conditions))
            (args.out / "book.html").write_text(as_html(results, conditions))
    print(f"report  {args.out / 'book.html'}, {args.out / 'book.md'}")


def add_tables(record: Recording, experiment: Experiment, seen: Mapping[str, Measured]) -> None:
    """Add an experiment's speeds and accuracies; results of an earlier command are not of this run."""
    title, base = f"{experiment.chapter} {experiment.title}", experiment.variants[0].name
    speed, accuracy = record.table(title, "images/s", base), record.table(f"{title}, accuracy", "%")
    for name, one in seen.items():
        if one.summaries:
            speed.add(name, *one.speeds)
            accuracy.add(name, *one.values("test_accuracy"))
        else:
            speed.missing[name] = one.refusal


def describe_conditions(each: int | None, epochs: int, rounds: int) -> tuple[str, ...]:
    """Return the conditions of the figures, a line each."""
    return (
        describe_machine(detect_machine(affinity=frozenset(os.sched_getaffinity(0)))),
        f"Python {platform.python_version()}, PyTorch {version('torch')}",
        f"accuracy and training s: one run of {epochs} epochs of"
        f" {'all images' if each is None else f'{10 * each:,} images'}",
        f"images/s, spread and first step: {rounds} runs of {SHORT_STEPS} steps, in turns" if rounds else "single runs",
        f"the book's seven tasks: {10 * QUICK[0]:,} images, and {FEW_STEPS} steps",
        "x is images/s against the first row",
    )


if __name__ == "__main__":
    main()
