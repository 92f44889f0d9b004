"""Runs variants in turns, and keeps every sample with its conditions in benchmarks/results/DATE-CPU-COMMIT.json."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.conditions import (
    BUSY_SHARE,
    ROOT,
    MachineFacts,
    Others,
    busy_cpus_now,
    is_busy,
    read_machine,
    read_source,
    read_versions,
)
from entrypoint.core.files import atomic_write_text

RESULTS = ROOT / "benchmarks/results"
FORMAT = 1
# Samples are kept with so many digits, more than any of them repeats.
DIGITS = 6
LIST_OF_NUMBERS = re.compile(r"\[[\s\d.,e+-]+\]")


class NotMeasuredError(Exception):
    """A variant cannot run here; the message is the reason."""


class Table(msgspec.Struct):
    """Samples of one unit by variant; `base` names the variant that the others are compared with.

    `missing` has the reason of each variant that did not run.
    """

    title: str
    unit: str
    base: str = ""
    samples: dict[str, list[float]] = msgspec.field(default_factory=dict)
    missing: dict[str, str] = msgspec.field(default_factory=dict)

    def add(self, variant: str, *values: float) -> None:
        """Add samples of a variant."""
        self.samples.setdefault(variant, []).extend(float(f"{value:.{DIGITS}g}") for value in values)

    def median(self, variant: str) -> float:
        """Return a variant's median."""
        return statistics.median(self.samples[variant])

    def range(self, variant: str) -> str:
        """Return a variant's smallest and largest sample as text, empty for a single one."""
        values = self.samples[variant]
        return f"{figure(min(values))}-{figure(max(values))}" if len(values) > 1 else ""

    def over(self, variant: str) -> float | None:
        """Return how far a variant's median is above the base's, None without a base."""
        return self.median(variant) - self.median(self.base) if self.base in self.samples else None

    def ratio(self, variant: str) -> float | None:
        """Return a variant's median relative to the base's, None without a base."""
        base = self.median(self.base) if self.base in self.samples else 0.0
        return self.median(variant) / base if base else None

    @property
    def heading(self) -> str:
        """The title with the unit; a ratio has none."""
        return f"{self.title}, {self.unit}" if self.unit else self.title

    def text(self) -> str:
        """Return the table as a benchmark prints it: median, range, number of samples, and the ratio to the base."""
        head = f"to {self.base}" if self.base else ""
        lines = [f"\n{self.heading:<40}{'median':>10}{'range':>18}{'n':>4}  {head}".rstrip()]
        for variant, values in self.samples.items():
            ratio = self.ratio(variant)
            compared = figure(ratio) if ratio and variant != self.base else ""
            row = f"{variant:<40}{figure(self.median(variant)):>10}{self.range(variant):>18}{len(values):>4}"
            lines.append(f"{row}  {compared}".rstrip())
        lines += [f"{variant:<40}  {reason}" for variant, reason in self.missing.items()]
        return "\n".join(lines)


def figure(value: float) -> str:
    """Return a figure with about three digits."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def take_turns(
    works: Mapping[str, Callable[[], Sequence[float]]], tables: Sequence[Table], rounds: int, *, warm_up: bool = False
) -> None:
    """Call all works in each round, so that other load on the machine affects them alike; print the tables.

    A work returns a value for each table, or raises `NotMeasuredError`, after which it is not called again.
    """
    for number in range(rounds + warm_up):
        for variant, work in works.items():
            if variant in tables[0].missing:
                continue
            try:
                values = work()
            except NotMeasuredError as error:
                tables[0].missing[variant] = str(error)
                continue
            if number >= warm_up:
                for table, value in zip(tables, values, strict=True):
                    table.add(variant, value)
    print(*(table.text() for table in tables), sep="\n", flush=True)


class Run(msgspec.Struct, kw_only=True):
    """One run of a benchmark: its conditions and its tables; `changed` are the files that differ from the commit.

    `busy_cpus` are the CPUs that other processes used on average, and in the second before; None where that is not
    known.
    """

    started: str
    command: str
    commit: str
    changed: list[str]
    machine: MachineFacts
    versions: dict[str, str]
    busy_cpus_at_start: float | None
    busy_cpus: float | None
    tables: list[Table]

    @property
    def is_busy(self) -> bool:
        """Whether other processes kept CPUs busy in the second before the run, or on average during it."""
        return any(is_busy(used, self.machine.cpus) for used in (self.busy_cpus_at_start, self.busy_cpus))


class Results(msgspec.Struct):
    """The content of a file: the runs of each benchmark, the oldest first."""

    format: int = FORMAT
    benchmarks: dict[str, list[Run]] = msgspec.field(default_factory=dict)


class Recording:
    """Collects the tables of a run."""

    def __init__(self) -> None:
        self.tables: list[Table] = []

    def table(self, title: str, unit: str, base: str = "") -> Table:
        """Return a new table."""
        if "/" in title or any(table.title == title for table in self.tables):
            raise ValueError(f"{title!r}: a title is unique, and has no slash")
        self.tables.append(Table(title, unit, base))
        return self.tables[-1]


def parse_options(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Add --record and --results to a parser, and parse."""
    group = parser.add_argument_group("records")
    group.add_argument("--record", action="store_true", help="keep the samples and their conditions")
    group.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    return parser.parse_args(words)


@contextmanager
def recording(benchmark: str, args: argparse.Namespace) -> Iterator[Recording]:
    """Yield where a benchmark's tables go, and add the run to its file if the benchmark succeeds.

    `args` are those of `parse_options`. Ends the program with code 2 if the file is there and is no record.
    """
    record = Recording()
    if not args.record:
        yield record
        return
    source, machine, now = read_source(), read_machine(), datetime.now(UTC)
    file = args.results / f"{now:%Y-%m-%d}-{machine.slug}-{source.commit[:7] or 'unknown'}.json"
    args.results.mkdir(parents=True, exist_ok=True)
    try:
        read_results(file)  # before hours of work, not after them
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    at_start, others = busy_cpus_now(), Others()
    yield record
    run = Run(
        started=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        command=command_line(),
        commit=source.commit,
        changed=sorted({*source.changed, *read_source().changed}),
        machine=machine,
        versions=read_versions(),
        busy_cpus_at_start=at_start,
        busy_cpus=others.busy_cpus(),
        tables=record.tables,
    )
    add_run(file, benchmark, run)
    busy = f"; the machine was busy: others used over {100 * BUSY_SHARE:.0f} % of it" if run.is_busy else ""
    print(f"\nrecorded in {file.name}{busy}", flush=True)


def command_line() -> str:
    """Return the command as it is typed at the top of the tree, without the options of the record."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    words = [word for word in sys.argv[1:] if word != "--record" and not word.startswith("--results=")]
    return without_paths(shlex.join(["python", "-m", name, *words]))


def without_paths(text: str) -> str:
    """Return a text without the folders of this tree and of its user."""
    return text.replace(str(ROOT), ".").replace(os.path.expanduser("~") + "/", "~/")  # noqa: PTH111


def read_results(file: Path) -> Results:
    """Return the content of a file, an empty one if it is not there; raises ValueError in one line."""
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except FileNotFoundError:
        return Results()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file.name}: not a record of benchmarks: {error}. Move it away.") from error
    if results.format != FORMAT:
        raise ValueError(f"{file.name}: format {results.format}, not {FORMAT}. Read it with its own version.")
    return results


def add_run(file: Path, benchmark: str, run: Run) -> None:
    """Add a run to a file atomically; two benchmarks that end at once wait for each other."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = read_results(file)
        results.benchmarks.setdefault(benchmark, []).append(run)
        text = json.dumps(msgspec.to_builtins(results), indent=1, ensure_ascii=False)
        text = LIST_OF_NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), text)
        atomic_write_text(file, without_paths(text) + "\n")
    finally:
        os.close(folder)


def read_runs(folder: Path = RESULTS) -> dict[str, list[Run]]:
    """Return the runs of each benchmark of all files, the newest first; raises ValueError in one line."""
    runs: dict[str, list[Run]] = {}
    for file in sorted(folder.glob("*.json")):
        for benchmark, recorded in read_results(file).benchmarks.items():
            runs.setdefault(benchmark, []).extend(recorded)
    return {name: sorted(recorded, key=lambda run: run.started, reverse=True) for name, recorded in runs.items()}
