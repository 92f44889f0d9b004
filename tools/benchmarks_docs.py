"""Writes benchmarks/README.md, and the figures of other documents, from benchmarks/results/: `make docs`."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from benchmarks.conditions import BUSY_SHARE
from benchmarks.runner import RESULTS, Run, Table, figure, read_runs
from tools.figures import ROOT, marked_pages, with_figures

PAGE, CLAIMS = ROOT / "benchmarks/README.md", ROOT / "benchmarks/claims.toml"
HEAD = f"""# Benchmarks

Each benchmark prints tables and asserts nothing. Variants alternate within one run, so that other load affects all
alike. Benchmarks on images need `CIFAR10_IMAGES`, the folder or archive of CIFAR-10.

A cell has median, range in parentheses, and after `x` the ratio to the row that the table's head names.
`BENCH_ARGS=--record` keeps every sample with its conditions in `benchmarks/results/DATE-CPU-COMMIT.json`.
A machine is busy if other processes use more than {100 * BUSY_SHARE:.0f} % of its CPUs before or during the run.

`make docs` writes this page from `benchmarks/results/` and `benchmarks/claims.toml`. Do not edit it.

| command | shows | takes |
|---|---|---|
"""
# Parts of a title that distinguish runs of one claim: seeds, programs, and the version of torch, which a column has.
RUN_PARTS = re.compile(r", seeds? \d+(, \d+)*(?=, )|(?<=accuracy) of .*$|, torch [\d.]+$")


class Claim(msgspec.Struct):
    """A sentence, and the titles of the tables that show it; `variants` are the rows, all without them."""

    text: str
    tables: list[str]
    variants: list[str] = msgspec.field(default_factory=list)


class Benchmark(msgspec.Struct):
    """What the page says of a benchmark; `rows` were recorded without samples, under these `conditions`."""

    command: str
    shows: str
    takes: str
    claims: list[Claim] = msgspec.field(default_factory=list)
    conditions: str = ""
    rows: list[tuple[str, str]] = msgspec.field(default_factory=list)


class Column(msgspec.Struct):
    """The tables of one machine with one version of torch, by title, and the runs that they come from."""

    tables: dict[str, Table] = msgspec.field(default_factory=dict)
    runs: list[Run] = msgspec.field(default_factory=list)


def page(folder: Path = RESULTS, claims: Path = CLAIMS) -> str:
    """Return the page; raises ValueError in one line for a record that cannot be read, or that no claim shows."""
    runs = read_runs(folder)
    content = tomllib.loads(claims.read_text())
    benchmarks = {name: msgspec.convert(facts, Benchmark) for name, facts in content.items()}
    if unknown := set(runs) - set(benchmarks):
        raise ValueError(f"{', '.join(sorted(unknown))}: not in {claims.name}. Say there what this benchmark shows.")
    lines = [HEAD + "\n".join(f"| `{one.command}` | {one.shows} | {one.takes} |" for one in benchmarks.values())]
    machines = name_machines([run for recorded in runs.values() for run in recorded])
    lines += ["\n## Machines\n", "| name | CPU | CPUs | memory, GPUs |", "|---|---|---|---|"]
    lines += [machine_row(name, run) for name, run in machines.values()]
    for name, benchmark in benchmarks.items():
        if benchmark.claims or benchmark.rows or name in runs:
            lines += section_lines(benchmark, runs.get(name, []), machines)
    return "\n".join(lines) + "\n"


def machine_key(run: Run) -> str:
    """Return what distinguishes machines: CPUs of one name may differ in what they can do."""
    return " ".join([run.machine.cpu, *run.machine.flags, *run.machine.gpus])


def name_machines(runs: Sequence[Run]) -> dict[str, tuple[str, Run]]:
    """Return a letter and a run of each machine, that with the most CPUs, by its key."""
    newest = sorted(runs, key=lambda run: (run.machine.cpus, run.started), reverse=True)
    by_key = {machine_key(run): run for run in reversed(newest)}
    return {key: (chr(ord("A") + number), by_key[key]) for number, key in enumerate(sorted(by_key, reverse=True))}


def machine_row(name: str, run: Run) -> str:
    """Return the row of a machine."""
    machine = run.machine
    flags = f" ({', '.join(machine.flags)})" if machine.flags else ""
    gpus = f", {', '.join(machine.gpus)}, driver {machine.driver}" if machine.gpus else ""
    quota = f", quota {machine.quota_cpus:g}" if machine.quota_cpus else ""
    return f"| {name} | {machine.cpu}{flags} | {machine.cpus}{quota} | {machine.memory_gib:g} GiB{gpus} |"


def section_lines(benchmark: Benchmark, runs: Sequence[Run], machines: Mapping[str, tuple[str, Run]]) -> Iterator[str]:
    """Yield the section of a benchmark: its claims with their tables, the runs, and the rows without samples.

    Raises ValueError for a claim without a record, and for a record without a claim.
    """
    yield f"\n## {benchmark.shows[0].upper()}{benchmark.shows[1:]}"
    columns = gather_columns(benchmark, runs, machines)
    for claim in benchmark.claims:
        yield f"\n{claim.text}"
        for title in claim.tables:
            yield from table_lines(
                title, {name: column.tables[title] for name, column in columns.items() if title in column.tables}, claim
            )
    for run in runs:
        if not any(run in column.runs for column in columns.values()):
            raise ValueError(f"{run.command} of {run.started} is on no page. Delete its record, or claim its tables.")
    if columns:
        yield "\n" + "".join(f"{name}: {runs_of(column)}.\n" for name, column in columns.items()).rstrip()
    if benchmark.rows:
        yield f"\n{benchmark.conditions}\n\n| what | value |\n|---|---|"
        yield from (f"| {what} | {value} |" for what, value in benchmark.rows)


def table_lines(title: str, tables: Mapping[str, Table], claim: Claim) -> Iterator[str]:
    """Yield a table with a column for each machine and version of torch; raises ValueError if there is none."""
    if not tables:
        raise ValueError(f"{title}: a claim names this table, and no record has it")
    first = next(iter(tables.values()))
    base = f" (x: to {first.base})" if first.base else ""
    yield f"\n| {first.heading}{base} | {' | '.join(tables)} |\n|{'---|' * (len(tables) + 1)}"
    variants = dict.fromkeys(variant for table in tables.values() for variant in (*table.samples, *table.missing))
    for variant in claim.variants or variants:
        yield f"| {variant} | {' | '.join(cell(table, variant) for table in tables.values())} |"


def gather_columns(
    benchmark: Benchmark, runs: Sequence[Run], machines: Mapping[str, tuple[str, Run]]
) -> dict[str, Column]:
    """Return the columns of a benchmark's tables; of tables with one title the newest counts, others are pooled."""
    claimed = {title for claim in benchmark.claims for title in claim.tables}
    columns: dict[str, Column] = {}
    seen: set[tuple[str, str]] = set()
    for run in runs:  # the newest first
        version = ".".join(run.versions.get("torch", "?").split(".")[:2])
        name = f"{machines[machine_key(run)][0]}, torch {version}"
        for table in run.tables:
            title = RUN_PARTS.sub("", table.title)
            if title not in claimed or (name, table.title) in seen:
                continue
            seen.add((name, table.title))
            column = columns.setdefault(name, Column())
            pooled = column.tables.setdefault(title, Table(title, table.unit, table.base))
            pooled.missing |= table.missing
            for variant, values in table.samples.items():
                pooled.add(variant, *values)
            column.runs += [run] * (run not in column.runs)
    return dict(sorted(columns.items()))


def runs_of(column: Column) -> str:
    """Return commit, date and most samples of a column's runs, and whether a machine was busy."""
    commits = dict.fromkeys(f"{run.commit[:7] or 'no commit'} of {run.started[:10]}" for run in column.runs)
    changed = ", with changed files" if any(run.changed for run in column.runs) else ""
    busy = ", **busy machine**" if any(run.is_busy for run in column.runs) else ""
    unknown = ", load of others unknown" if any(run.busy_cpus is None for run in column.runs) else ""
    count = max(len(values) for table in column.tables.values() for values in table.samples.values())
    return f"commit {' and '.join(commits)}, n = {count}{changed}{busy}{unknown}"


def cell(table: Table, variant: str) -> str:
    """Return a variant's median, range and ratio to the base, or why it did not run."""
    if variant not in table.samples:
        reason = table.missing.get(variant, "")
        return " ".join(reason.replace("|", "\\|").split()[:20])
    spread, ratio = table.range(variant), table.ratio(variant)
    parts = figure(table.median(variant)) + (f" ({spread})" if spread else "")
    return f"{parts} x{figure(ratio)}" if ratio and variant != table.base else parts


def main() -> None:
    """Write the page, then the figures of the other documents."""
    PAGE.write_text(page())
    runs = read_runs()
    for document in marked_pages():
        document.write_text(with_figures(document.read_text(), runs))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"benchmarks_docs.py: {error}")
