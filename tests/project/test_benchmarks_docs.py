"""The page of benchmarks and the figures of other pages, from records that are built here."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.conditions import MachineFacts
from benchmarks.runner import Run, Table, add_run, read_runs
from tools import benchmarks_docs
from tools.figures import marked_pages, with_figures

MACHINE = MachineFacts("AMD EPYC 9B14 96-Core Processor", 2, 1, 1.5, ["avx2"], 16.0, [], "")
# A table that no claim names.
SWEEP = Table("sweep", "s", samples={"ours": [9.0]})
CLAIMS = """
[launch]
command = "make bench-launch"
shows = "the start"
takes = "1 min"
claims = [{ text = "It starts soon.", tables = ["one rank", "two ranks"] }]
conditions = "Two cores, 2026-10."
rows = [["start, s", "0.13 to 0.30"]]

[limit]
command = "make bench-limit"
shows = "the limit"
takes = "3 min"
"""


def table(title: str, *values: float) -> Table:
    """Return a table of seconds in which the entrypoint has these samples, and python takes 0.1 s."""
    return Table(title, "s", "python", samples={"python": [0.1], "ours": [*values]}, missing={"x": "a | b\nc"})


def run(day: int, *tables: Table, used: float | None = 0.0, machine: MachineFacts = MACHINE) -> Run:
    """Return a run of a day of November, during which others used so many CPUs."""
    return Run(
        started=f"2026-11-{day:02}T12:00:00Z",
        command="python -m benchmarks.launch",
        commit=f"{day}123456789",
        changed=[],
        machine=machine,
        versions={"python": "3.13.1", "torch": "2.15.0"},
        busy_cpus_at_start=used,
        busy_cpus=used,
        tables=[*tables],
    )


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Return a folder with a busy run, a newer quiet one with one of its tables, and one of another machine."""
    other = MachineFacts("Other CPU", 1, 1, None, [], 8.0, ["H200"], "580.1")
    (tmp_path / "claims.toml").write_text(CLAIMS)
    add_run(tmp_path / "2026-11-01-a.json", "launch", run(1, table("one rank", 5.0), table("two ranks", 0.4), used=1.0))
    add_run(tmp_path / "2026-11-02-a.json", "launch", run(2, table("one rank", 0.2, 0.4, 0.3), SWEEP))
    add_run(tmp_path / "2026-10-01-b.json", "launch", run(3, table("one rank", 0.7), used=None, machine=other))
    return tmp_path


def page(results: Path) -> str:
    """Return the page of these results."""
    return benchmarks_docs.page(results, results / "claims.toml")


def test_page_has_a_column_for_each_machine_with_newest_tables(results: Path) -> None:
    text = page(results)
    assert "\nIt starts soon.\n\n| one rank, s (x: to python) | A, torch 2.15 | B, torch 2.15 |\n" in text
    assert "| ours | 0.700 x7.00 | 0.300 (0.200-0.400) x3.00 |" in text
    assert "| two ranks, s (x: to python) | B, torch 2.15 |" in text
    assert "| ours | 0.400 x4.00 |" in text
    assert "5.00" not in text
    assert "sweep" not in text
    assert r"| x | a \| b c | a \| b c |" in text
    assert "\nTwo cores, 2026-10.\n\n| what | value |\n|---|---|\n| start, s | 0.13 to 0.30 |\n" in text
    assert "| `make bench-limit` | the limit | 3 min |" in text
    assert "## The limit" not in text


def test_page_names_machines_commits_and_load(results: Path) -> None:
    text = page(results)
    assert "| B | AMD EPYC 9B14 96-Core Processor (avx2) | 2, quota 1.5 | 16 GiB |\n" in text
    assert "| A | Other CPU | 1 | 8 GiB, H200, driver 580.1 |\n" in text
    assert "\nA, torch 2.15: commit 3123456 of 2026-11-03, n = 1, load of others unknown.\n" in text
    assert "commit 2123456 of 2026-11-02 and 1123456 of 2026-11-01, n = 3, **busy machine**.\n" in text


def test_cpus_of_one_name_with_other_flags_have_a_column(results: Path) -> None:
    newer = MachineFacts(MACHINE.cpu, 2, 1, 1.5, ["avx2", "avx512f"], 16.0, [], "")
    add_run(results / "2026-11-05-a.json", "launch", run(5, table("one rank", 0.6), machine=newer))
    assert "| ours | 0.700 x7.00 | 0.600 x6.00 | 0.300 (0.200-0.400) x3.00 |" in page(results)


def test_seeds_of_one_claim_are_pooled(results: Path) -> None:
    claims = CLAIMS.replace('"two ranks"', '"accuracy"')
    (results / "claims.toml").write_text(claims.replace('"one rank"', '"one rank", "two ranks"'))
    for day, title in ((6, "accuracy of ours"), (7, "accuracy of ours and timm")):
        add_run(results / f"2026-11-0{day}-a.json", "launch", run(day, table(title, 0.2 + day)))
    assert "| ours | 6.70 (6.20-7.20) x67.0 |" in page(results)


@pytest.mark.parametrize(
    ("benchmark", "title", "said"),
    [
        ("lunch", "one rank", r"^lunch: not in claims\.toml\. Say there what this benchmark shows\.$"),
        ("launch", "three ranks", r"^python -m benchmarks\.launch of 2026-11-04T12:00:00Z is on no page\. Delete its"),
        ("limit", "one rank", r"^python -m benchmarks\.launch of 2026-11-04T12:00:00Z is on no page\. Delete its"),
    ],
)
def test_record_that_no_claim_shows_is_an_error(results: Path, benchmark: str, title: str, said: str) -> None:
    add_run(results / "2026-11-04-a.json", benchmark, run(4, table(title, 1.0)))
    with pytest.raises(ValueError, match=said):
        page(results)


def test_claim_without_a_record_is_an_error(results: Path) -> None:
    (results / "claims.toml").write_text(CLAIMS.replace('"two ranks"', '"three ranks"'))
    with pytest.raises(ValueError, match=r"^three ranks: a claim names this table, and no record has it$"):
        page(results)


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
