"""Figures of a document that come from the records of benchmarks: `make docs` writes them.

A figure stands between two comments of Markdown:

    <!-- figure: launch/one rank/entrypoint/over -->0.21 s<!-- /figure -->

The words name benchmark, table, variant and statistic: median, range, min, max, over or ratio (to the table's base).
A figure of a busy machine says so. Two more are n, the number of samples, and where: machine and date.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.runner import Run, Table, figure

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("*.md", "*/README.md", "docs/*.md")
MARKED = re.compile(r"(<!-- figure: (.*?) -->)(.*?)(<!-- /figure -->)", re.DOTALL)
BUSY = " (busy machine)"


def marked_pages(root: Path = ROOT) -> list[Path]:
    """Return the documents that have figures."""
    pages = sorted({page for pattern in PAGES for page in root.glob(pattern)})
    return [page for page in pages if MARKED.search(page.read_text())]


def with_figures(text: str, runs: Mapping[str, Sequence[Run]]) -> str:
    """Return a text with the newest figures; raises ValueError that names a figure that no record has."""
    return MARKED.sub(lambda found: found[1] + figure_text(found[2], runs) + found[4], text)


def figure_text(place: str, runs: Mapping[str, Sequence[Run]]) -> str:
    """Return a figure with its unit, from the newest run that has it; raises ValueError."""
    words = place.split("/")
    if len(words) != 4:
        raise ValueError(f"figure {place}: name it as benchmark/table/variant/statistic")
    benchmark, title, variant, statistic = words
    for run in runs.get(benchmark, ()):
        for table in run.tables:
            if table.title == title and variant in table.samples:
                if statistic == "n":
                    return str(len(table.samples[variant]))
                if statistic == "where":
                    return f"{run.machine.cpu} with {run.machine.cpus} CPUs, {run.started[:10]}"
                return statistic_text(table, variant, statistic, place) + BUSY * run.is_busy
    raise ValueError(f"figure {place}: no record of {benchmark} has it")


def statistic_text(table: Table, variant: str, statistic: str, place: str) -> str:
    """Return one statistic of a variant as text; raises ValueError if the table has none of that name."""
    values = table.samples[variant]
    unit = f" {table.unit}" if table.unit else ""
    if statistic == "range":
        return f"{figure(min(values))} to {figure(max(values))}{unit}"
    numbers = {
        "median": table.median(variant), "min": min(values), "max": max(values), "over": table.over(variant),
    }  # fmt: skip
    number = {**numbers, "ratio": table.ratio(variant)}.get(statistic)
    if number is None:
        known = ", ".join([*numbers, "ratio", "range", "n", "where"])
        raise ValueError(f"figure {place}: {statistic} is none of {known}, or the table names no base")
    return figure(number) + (unit if statistic in numbers else "")
