"""The page of benchmarks and the figures of other pages, from records that are built here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.conditions import Load, MachineFacts
from benchmarks.record import Run, add_run, read_runs
from benchmarks.tables import Table
from tools import benchmarks_docs
from tools.figures import marked_pages, with_figures

MACHINE = MachineFacts("AMD EPYC 9B14 96-Core Processor", 2, 1, 1.5, ["avx2"], 16.0, [], "")
EARLIER = {"what": "start", "value": "0.13 to 0.30", "n": "n = 5", "machine": "2 cores", "date": "2026-10"}


def table(title: str, *values: float) -> Table:
    """Return a table of seconds in which the entrypoint has these samples, and python takes 0.1 s."""
    return Table(title, "s", "python", samples={"python": [0.1], "ours": [*values]}, missing={"x": "a | b\nc"})


def run(day: int, *tables: Table, used: float | None = 0.0, machine: MachineFacts = MACHINE) -> Run:
    """Return a run of a day of November, during which others used so many CPUs."""
    load, started = Load([], {}, 0.0), f"2026-11-{day:02}T12:00:00Z"
    versions = {"python": "3.13.1", "torch": "2.15.0"}
    command = "python -m benchmarks.launch"
    return Run(
        started, 60.0, command, 7, 19 * (used is None), "0123456789", [], machine, versions, load, load, used, used,
        [*tables],
    )  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with a busy run, a newer quiet one with one of its tables, and one of another machine."""
    about = {"command": "make bench-launch", "shows": "the start", "takes": "1 min", "results": [EARLIER]}
    (tmp_path / "launch.json").write_text(json.dumps(about))
    (tmp_path / "limit.json").write_text(json.dumps({**about, "command": "make bench-limit", "results": []}))
    hidden = Table("sweep", "s", detail=True, samples={"ours": [9.0]})
    other = MachineFacts("Other CPU", 1, 1, None, [], 8.0, ["H200"], "580.1")
    add_run(tmp_path / "2026-11-01-a.json", "launch", run(1, table("one rank", 5.0), table("two ranks", 0.4), used=1.0))
    add_run(tmp_path / "2026-11-02-a.json", "launch", run(2, table("one rank", 0.2, 0.4, 0.3), hidden))
    add_run(tmp_path / "2026-10-01-b.json", "launch", run(3, table("one rank", 0.7), used=None, machine=other))
    return tmp_path


def test_page_shows_newest_table_of_each_machine(results: Path) -> None:
    text = benchmarks_docs.page(results)
    assert "| ours | 0.300 | 0.200-0.400 | 3 | 3.00 (+0.200 s) |" in text
    assert "| ours | 0.400 |  | 1 | 4.00 (+0.300 s) |" in text
    assert "| ours | 0.700 |  | 1 | 7.00 (+0.600 s) |" in text
    assert "5.00" not in text
    assert "sweep" not in text
    assert r"| x | a \| b c | | | |" in text
    assert "| start | 0.13 to 0.30 | n = 5 | 2 cores | 2026-10 |" in text
    assert text.endswith("No figures are recorded yet for `make bench-limit`.\n")


def test_cpus_of_one_name_with_other_flags_have_own_tables(results: Path) -> None:
    newer = MachineFacts(MACHINE.cpu, 2, 1, 1.5, ["avx2", "avx512f"], 16.0, [], "")
    add_run(results / "2026-11-05-a.json", "launch", run(5, table("one rank", 0.6), machine=newer))
    text = benchmarks_docs.page(results)
    assert "| ours | 0.600 |  | 1 | 6.00 (+0.500 s) |" in text
    assert "| ours | 0.300 | 0.200-0.400 | 3 | 3.00 (+0.200 s) |" in text


def test_page_names_machine_date_commit_and_load(results: Path) -> None:
    text = benchmarks_docs.page(results)
    assert "AMD EPYC 9B14 96-Core Processor (avx2): 1 core, 2 CPUs, quota 1.5, 16 GiB.\n" in text
    assert "Run on 2026-11-02 from commit 0123456: `python -m benchmarks.launch`, 7 rounds.\n" in text
    assert "Quiet machine: others used 0.0 of 2 CPUs before it and 0.0 during it (busy: over 10 %).\n" in text
    assert "**Busy machine**: others used 1.0 of 2 CPUs before it and 1.0 during it" in text
    assert "Other CPU: 1 core, 1 CPU, 8 GiB. GPU: H200, driver 580.1.\n" in text
    assert "`python -m benchmarks.launch`, 7 rounds, at niceness 19.\n" in text
    assert "**Load of others unknown**: others used ? of 1 CPUs before it and ? during it" in text


def test_record_of_unknown_benchmark_is_refused(results: Path) -> None:
    add_run(results / "2026-11-04-a.json", "lunch", run(4, table("one rank", 1.0)))
    with pytest.raises(ValueError, match=r"^lunch: no .*/NAME.json says what this benchmark shows$"):
        benchmarks_docs.page(results)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("launch/two ranks/ours/median", "0.400 s (busy machine)"),
        ("launch/sweep/ours/max", "9.00 s"),
        ("launch/one rank/ours/over", "0.600 s"),
        ("launch/one rank/ours/ratio", "7.00"),
        ("launch/two ranks/ours/n", "1"),
        ("launch/two ranks/ours/where", "AMD EPYC 9B14 96-Core Processor with 2 CPUs, 2026-11-01"),
        ("launch/two ranks/ours/range", "0.400 to 0.400 s (busy machine)"),
    ],
)
def test_figures_between_marks_are_replaced(results: Path, place: str, text: str) -> None:
    page = f"It takes <!-- figure: {place} -->9 s<!-- /figure -->, and 9 s."
    assert (
        with_figures(page, read_runs(results)) == f"It takes <!-- figure: {place} -->{text}<!-- /figure -->, and 9 s."
    )


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("launch/one rank/ours", "name it as benchmark/table/variant/statistic"),
        ("launch/one rank/theirs/median", "no record of launch has it"),
        ("limit/one rank/ours/median", "no record of limit has it"),
        ("launch/one rank/ours/mean", "mean is none of median, min, max, over, ratio, range, n, where"),
        ("launch/sweep/ours/ratio", "ratio is none of .*, or the table names no base"),
    ],
)
def test_figure_without_a_record_is_an_error(results: Path, place: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"^figure {place}: {said}"):
        with_figures(f"<!-- figure: {place} -->1 s<!-- /figure -->", read_runs(results))


def test_pages_with_figures_are_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("plain\n")
    marked = tmp_path / "docs/performance.md"
    marked.write_text("<!-- figure: launch/one rank/ours/n -->\n7<!-- /figure -->")
    assert marked_pages(tmp_path) == [marked]
