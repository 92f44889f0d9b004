"""Keeps what a benchmark measured: every sample and its conditions, in benchmarks/results/DATE-CPU-COMMIT.json.

A run is recorded by default if it has the benchmark's own options and the tree is that of its commit. Other runs would
give a commit figures that are not its own, or replace a whole table by a quick look at a part of it. `--record` records
them too, and says that files differed; `--no-record` records nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from benchmarks.conditions import (
    BUSY_SHARE,
    ROOT,
    Load,
    MachineFacts,
    Others,
    Source,
    busy_cpus_now,
    is_busy,
    read_load,
    read_machine,
    read_source,
    read_versions,
)
from benchmarks.tables import Table
from entrypoint.core.atomic_files import atomic_write_text

RESULTS = ROOT / "benchmarks/results"
RECORDS = "[0-9][0-9][0-9][0-9]-*.json"
FORMAT = 1
LIST_OF_NUMBERS = re.compile(r"\[[\s\d.,e+-]+\]")


class Run(msgspec.Struct):
    """One run of a benchmark: its conditions and its tables; `changed` are the files that differ from the commit.

    HEAD is one of them if another commit was checked out meanwhile.
    `busy_cpus` are the CPUs that other processes used on average, and in the second before; None where that is not
    known. `niceness` is 0 for a run that competes with others as usual, up to 19 for one that lets others go first.
    """

    started: str
    seconds: float
    command: str
    rounds: int
    niceness: int
    commit: str
    changed: list[str]
    machine: MachineFacts
    versions: dict[str, str]
    before: Load
    after: Load
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
    """Collects the tables of a run; `file` is where they go, None if nothing is recorded.

    A benchmark whose work is done by no child of its own, such as a container, unsets `counts_children`: that work is
    then not mistaken for other processes'.
    """

    def __init__(self, file: Path | None) -> None:
        self.file, self.tables, self.counts_children = file, list[Table](), True

    def table(self, title: str, unit: str, base: str = "", *, detail: bool = False) -> Table:
        """Return a new table."""
        if "/" in title or any(one.title == title for one in self.tables):
            raise ValueError(f"{title!r}: a title is unique, and has no slash")
        self.tables.append(Table(title, unit, base, detail))
        return self.tables[-1]


def parse_options(parser: argparse.ArgumentParser, words: Sequence[str] | None = None) -> argparse.Namespace:
    """Add --record, --no-record and --results to a parser, and parse; `partial` says which options are not its own."""
    group = parser.add_argument_group("records")
    group.add_argument(
        "--record", action=argparse.BooleanOptionalAction, help="keep the samples; by default from a clean tree"
    )
    group.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    args = parser.parse_args(words)
    own = {name: value for name, value in vars(args).items() if name not in ("record", "results")}
    args.partial = [f"--{name}".replace("_", "-") for name, value in own.items() if value != parser.get_default(name)]
    return args


def reason_not_to_record(args: argparse.Namespace, source: Source) -> str:
    """Return why a run is not recorded, empty if it is."""
    if args.record is not None:
        return "" if args.record else "--no-record was given"
    if args.partial:
        return f"{', '.join(args.partial)} is not as `make` runs it"
    if not source.commit:
        return "this is no git clone"
    more = f" and {len(source.changed) - 1} more" if len(source.changed) > 1 else ""
    return f"{source.changed[0]}{more} is not committed" if source.changed else ""


@contextmanager
def recording(benchmark: str, args: argparse.Namespace, rounds: int) -> Iterator[Recording]:
    """Yield where a benchmark's tables go, and add the run to its file if the benchmark succeeds.

    `args` are those of `parse_options`. Ends the program with code 2 if the file is there and is no record.
    """
    source, machine = read_source(), read_machine()
    if reason := reason_not_to_record(args, source):
        if args.record is None:
            print(f"not recorded: {reason}; --record records it anyway", file=sys.stderr, flush=True)
        yield Recording(None)
        return
    now = datetime.now(UTC)
    file = args.results / f"{now:%Y-%m-%d}-{machine.slug}-{source.commit[:7] or 'unknown'}.json"
    args.results.mkdir(parents=True, exist_ok=True)
    try:
        read_results(file)  # before hours of work, not after them
    except ValueError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from error
    record = Recording(file)
    at_start, before, others, clock = busy_cpus_now(), read_load(), Others(), time.monotonic()
    yield record
    seconds, used, later = time.monotonic() - clock, others.busy_cpus(), read_source()
    changed = sorted({*source.changed, *later.changed, *(["HEAD"] if later.commit != source.commit else [])})
    run = Run(
        f"{now:%Y-%m-%dT%H:%M:%SZ}", round(seconds, 1), command_line(args), rounds, os.nice(0), source.commit, changed,
        machine, read_versions(), before, read_load(), at_start, used if record.counts_children else None,
        record.tables,
    )  # fmt: skip
    add_run(file, benchmark, run)
    busy = f", the machine was busy: {busy_text(run)}" if run.is_busy else ""
    print(f"\nrecorded in {file.name}{busy}", flush=True)


def command_line(args: argparse.Namespace) -> str:
    """Return the command as it is typed at the top of the tree, without the options of the record."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).name
    given = vars(args)
    words: list[str] = []
    for flag in args.partial:
        value = given[flag.removeprefix("--").replace("-", "_")]
        listed = [str(one) for one in value] if isinstance(value, list) else []
        words += [flag, *listed] if listed or value is True else [f"{flag}={value}"]
    return without_paths(shlex.join(["python", "-m", name, *words]))


def without_paths(text: str) -> str:
    """Return a text without the folders of this tree and of its user."""
    return text.replace(str(ROOT), ".").replace(os.path.expanduser("~") + "/", "~/")  # noqa: PTH111


def read_results(file: Path) -> Results:
    """Return the content of a file, an empty one if it is not there; raises ValueError in one line."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Results)
    except FileNotFoundError:
        return Results()
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file.name}: not a record of benchmarks: {error}. Move it away.") from error
    if found.format != FORMAT:
        raise ValueError(f"{file.name}: format {found.format}, not {FORMAT}. Read it with its own version.")
    return found


def add_run(file: Path, benchmark: str, run: Run) -> None:
    """Add a run to a file atomically; two benchmarks that end at once wait for each other."""
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        results = read_results(file)
        results.benchmarks.setdefault(benchmark, []).append(run)
        text = json.dumps(msgspec.to_builtins(results), indent=1, ensure_ascii=False)
        text = LIST_OF_NUMBERS.sub(lambda found: " ".join(found[0].split()), text)
        atomic_write_text(file, without_paths(text) + "\n")
    finally:
        os.close(folder)


def read_runs(folder: Path = RESULTS) -> dict[str, list[Run]]:
    """Return the runs of each benchmark of all files, the newest first; raises ValueError in one line."""
    runs: dict[str, list[Run]] = {}
    for file in sorted(folder.glob(RECORDS)):
        for benchmark, found in read_results(file).benchmarks.items():
            runs.setdefault(benchmark, []).extend(found)
    return {name: sorted(found, key=lambda run: run.started, reverse=True) for name, found in runs.items()}


def busy_text(run: Run) -> str:
    """Return how many CPUs others used before and during a run."""
    before, during = ("?" if used is None else f"{used:.1f}" for used in (run.busy_cpus_at_start, run.busy_cpus))
    limit = f"busy: over {100 * BUSY_SHARE:.0f} %"
    return f"others used {before} of {run.machine.cpus} CPUs before it and {during} during it ({limit})"
