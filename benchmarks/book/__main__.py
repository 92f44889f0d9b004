"""The book's result tables, measured on this machine: `make book`, or `make book-quick` for a part of the data.

Conditions: the book's CNN on real CIFAR-10 pictures (CIFAR10_IMAGES, or fetched), our own loop and recipe; variants
of an experiment alternate, each round with a seed of its own; medians and spread. The book's own figures are of other
machines, and of Fashion-MNIST (chapter 2) or DenseNet121 on a GPU (chapter 3): ratios compare, seconds do not. What
this machine lacks is a row with the reason. It prints a line for each experiment and asserts nothing.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

from benchmarks.book.experiments import EXPERIMENTS
from benchmarks.book.measure import alternate, pictures
from benchmarks.book.report import Result, as_html, as_markdown
from entrypoint.machine import read_machine
from entrypoint.planner import describe_node

# Pictures of each class, epochs, rounds.
QUICK, FULL = (100, 2, 1), (None, 10, 5)


def main() -> None:
    """Run all experiments, or those that are named, and write the report after each."""
    parser = argparse.ArgumentParser(prog="make book")
    parser.add_argument("--quick", action="store_true", help="a few pictures, two epochs, one round")
    parser.add_argument("--rounds", type=int, help="how often each variant runs")
    parser.add_argument("--only", default="", help="chapters with commas: 2,9.2")
    parser.add_argument("--out", type=Path, default=Path("book"), help="folder of book.html and book.md")
    asked = parser.parse_args()
    each, epochs, rounds = QUICK if asked.quick else FULL
    rounds = asked.rounds or rounds
    asked.out.mkdir(parents=True, exist_ok=True)
    conditions = (
        describe_node(read_machine(affinity=frozenset(os.sched_getaffinity(0)))),
        f"Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}",
        f"{epochs} epochs of {'all pictures' if each is None else f'{10 * each:,} pictures'}, {rounds} runs of each"
        " variant; x is images/s against the first row",
    )
    results: list[Result] = []
    began = time.monotonic()
    with pictures(each) as data:
        for experiment in EXPERIMENTS:
            if asked.only and experiment.chapter not in asked.only.split(","):
                continue
            seen = alternate(experiment.variants, {**data, "TRAIN_EPOCHS": str(epochs)}, rounds)
            results.append(Result(experiment, seen))
            spent = time.monotonic() - began
            print(f"{spent:5.0f} s  {experiment.chapter:4} {experiment.title}: {results[-1].verdict}", flush=True)
            (asked.out / "book.md").write_text(as_markdown(results, conditions))
            (asked.out / "book.html").write_text(as_html(results, conditions))
    print(f"report  {asked.out / 'book.html'}, {asked.out / 'book.md'}")


if __name__ == "__main__":
    main()
