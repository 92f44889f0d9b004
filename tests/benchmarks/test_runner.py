"""Variants in turns, medians, ranges and ratios, records, and a benchmark for real."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from benchmarks import launch, runner
from benchmarks.conditions import Source, read_machine
from benchmarks.runner import (
    NotMeasuredError,
    Run,
    Table,
    figure,
    parse_options,
    read_results,
    read_runs,
    recording,
    take_turns,
)

CLEAN = Source("0123456789abcdef0123456789abcdef01234567", [])


@dataclass
class Tree:
    """What the benchmark finds: its commit, and the CPUs that others use at its start and during it."""

    source: Source = CLEAN
    at_start: float | None = 0.0
    during: float | None = 0.0

    def busy_cpus(self) -> float | None:
        """Return what others use during the benchmark."""
        return self.during


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Put a known commit and load in the place of this machine's."""
    found = Tree()
    monkeypatch.setattr(runner, "read_source", lambda: found.source)
    monkeypatch.setattr(runner, "busy_cpus_now", lambda: found.at_start)
    monkeypatch.setattr(runner, "Others", lambda: found)
    return found


def options(*words: str, record: bool = True) -> argparse.Namespace:
    """Return a benchmark's options."""
    return parse_options(argparse.ArgumentParser(), [*words, *["--record"] * record])


def run_once(args: argparse.Namespace, benchmark: str = "launch", seconds: float = 0.25) -> None:
    """Record one table."""
    with recording(benchmark, args) as out:
        out.table("one rank", "s", "python").add("python", seconds, seconds / 3)


@pytest.mark.usefixtures("tree")
def test_second_run_is_added_to_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark, seconds in (("launch", 0.25), ("launch", 0.5), ("limit", 1.0)):
        run_once(options("--results", str(tmp_path)), benchmark, seconds)
    (file,) = tmp_path.iterdir()
    assert file.match(f"????-??-??-{read_machine().slug}-0123456.json")
    runs = read_results(file).benchmarks
    assert [run.tables[0].samples["python"] for run in runs["launch"]] == [[0.25, 0.0833333], [0.5, 0.166667]]
    assert "[ 0.25, 0.0833333 ]" in file.read_text()
    assert json.loads(file.read_text())["benchmarks"]["launch"][0]["commit"] == CLEAN.commit
    assert f"recorded in {file.name}" in capsys.readouterr().out
    assert [run.started for run in read_runs(tmp_path)["launch"]] == sorted(
        (run.started for run in runs["launch"]), reverse=True
    )


@pytest.mark.usefixtures("tree")
def test_run_is_recorded_only_on_request(tmp_path: Path) -> None:
    run_once(options(f"--results={tmp_path}", record=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("used", "busy"), [((0.0, 0.0), False), ((None, None), False), ((9000.0, 0.0), True), ((0.0, 9000.0), True)]
)
def test_record_says_that_the_machine_was_busy(
    tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str], used: tuple[float | None, float | None], busy: bool
) -> None:
    tree.at_start, tree.during = used
    run_once(options("--results", str(tmp_path)))
    (run,) = read_runs(tmp_path)["launch"]
    assert run.is_busy is busy
    assert ("the machine was busy: others used over 10 %" in capsys.readouterr().out) is busy


def test_record_names_files_that_changed_meanwhile(tree: Tree, tmp_path: Path) -> None:
    tree.source = Source(CLEAN.commit, ["a.py"])
    with recording("launch", options(f"--results={tmp_path}")):
        tree.source = Source(CLEAN.commit, ["b.py"])
    (run,) = read_runs(tmp_path)["launch"]
    assert (run.commit, run.changed) == (CLEAN.commit, ["a.py", "b.py"])


@pytest.mark.usefixtures("tree")
def test_failed_benchmark_and_foreign_file_leave_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = options("--results", str(tmp_path))
    with pytest.raises(RuntimeError), recording("launch", args):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    run_once(args)
    (file,) = tmp_path.iterdir()
    for content, said in (("[1]", "not a record of benchmarks: "), ('{"format": 9}', "format 9, not 1. ")):
        file.write_text(content)
        with pytest.raises(SystemExit) as ended:
            run_once(args)
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"{file.name}: {said}")
        assert file.read_text() == content


@pytest.mark.usefixtures("tree")
def test_titles_of_tables_are_unique(tmp_path: Path) -> None:
    with recording("launch", options("--results", str(tmp_path))) as out:
        out.table("one rank", "s")
        for title in ("one rank", "images/s"):
            with pytest.raises(ValueError, match="a title is unique, and has no slash"):
                out.table(title, "s")


@pytest.mark.launch
@pytest.mark.usefixtures("tree")
def test_launch_benchmark_is_recorded_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["benchmarks/launch.py", "--rounds=1", "--record", f"--results={tmp_path}"]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(launch, "ONE_RANK", {name: launch.ONE_RANK[name] for name in ("python", "entrypoint")})
    monkeypatch.setattr(launch, "TWO_RANKS", {"entrypoint": launch.TWO_RANKS["entrypoint"]})
    monkeypatch.setattr(launch, "SHORTEST", {"entrypoint train": ("no_such_module", [])})
    launch.main()
    run: Run
    (run,) = read_runs(tmp_path)["launch"]
    assert run.command.endswith(" --rounds=1")
    one, two, shortest = run.tables
    assert 0 < one.samples["python"][0] < one.samples["entrypoint"][0]
    assert len(two.samples["entrypoint"]) == 1
    assert shortest.missing == {"entrypoint train": "not installed"}


def test_turns_alternate_and_leave_out_what_cannot_run() -> None:
    calls: list[str] = []

    def work(name: str) -> tuple[float, float]:
        calls.append(name)
        if name == "none":
            raise NotMeasuredError("not installed")
        return float(len(calls)), 10.0 * len(calls)

    tables = Table("rates", "images/s"), Table("commands", "s")
    works = {name: partial(work, name) for name in ("a", "none", "b")}
    take_turns(works, tables, 2, warm_up=True)
    assert calls == ["a", "none", "b", "a", "b", "a", "b"]
    assert tables[0].samples == {"a": [4.0, 6.0], "b": [5.0, 7.0]}
    assert tables[1].samples == {"a": [40.0, 60.0], "b": [50.0, 70.0]}
    assert tables[0].missing == {"none": "not installed"}


def seconds() -> Table:
    """Return a table of seconds with a base, another variant and a missing one."""
    table = Table("one rank", "s", "python", missing={"accelerate": "not installed"})
    table.add("python", 0.02, 0.04, 0.03)
    table.add("ours", 0.3)
    table.add("ours", 0.2, 0.1)
    return table


def test_every_sample_is_kept_and_compared_with_the_base() -> None:
    table = seconds()
    assert table.samples == {"python": [0.02, 0.04, 0.03], "ours": [0.3, 0.2, 0.1]}
    assert (table.median("ours"), table.range("ours")) == (0.2, "0.100-0.300")
    assert table.over("ours") == pytest.approx(0.17)
    assert table.ratio("ours") == pytest.approx(0.2 / 0.03)


def test_printed_table_has_a_row_for_each_variant() -> None:
    lines = seconds().text().splitlines()
    assert lines[1].split() == ["one", "rank,", "s", "median", "range", "n", "to", "python"]
    assert lines[2].split() == ["python", "0.030", "0.020-0.040", "3"]
    assert lines[3].split() == ["ours", "0.200", "0.100-0.300", "3", "6.67"]
    assert lines[4].split() == ["accelerate", "not", "installed"]


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (99.44, "99.4"), (1.234, "1.23"), (0.01234, "0.012"), (-0.5, "-0.500")]
)
def test_figure_has_about_three_digits(value: float, text: str) -> None:
    assert figure(value) == text
