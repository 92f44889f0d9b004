"""Records of benchmarks: when one is written, what is in it, and a benchmark for real."""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.conditions import Source, read_machine
from benchmarks.record import Run, parse_options, read_results, read_runs, reason_not_to_record, recording
from tests.conftest import PYTHON

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
    monkeypatch.setattr(record, "read_source", lambda: found.source)
    monkeypatch.setattr(record, "busy_cpus_now", lambda: found.at_start)
    monkeypatch.setattr(record, "Others", lambda: found)
    return found


def options(*words: str) -> argparse.Namespace:
    """Return a benchmark's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-training", action="store_true")
    return parse_options(parser, words)


def run_once(args: argparse.Namespace, benchmark: str = "launch", seconds: float = 0.25) -> None:
    """Record one table."""
    with recording(benchmark, args, args.rounds) as out:
        out.table("one rank", "s", "python").add("python", seconds, seconds / 3)


@pytest.mark.usefixtures("tree")
def test_second_run_is_added_to_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for benchmark, seconds in (("launch", 0.25), ("launch", 0.5), ("limit", 1.0)):
        run_once(options("--results", str(tmp_path)), benchmark, seconds)
    (file,) = tmp_path.iterdir()
    assert file.match(f"????-??-??-{read_machine().slug}-0123456.json")
    runs = read_results(file).benchmarks
    assert [run.tables[0].samples["python"] for run in runs["launch"]] == [[0.25, 0.0833333], [0.5, 0.166667]]
    assert [run.rounds for run in runs["limit"]] == [5]
    assert "[ 0.25, 0.0833333 ]" in file.read_text()
    assert json.loads(file.read_text())["benchmarks"]["launch"][0]["commit"] == CLEAN.commit
    assert f"recorded in {file.name}" in capsys.readouterr().out
    assert [run.started for run in read_runs(tmp_path)["launch"]] == sorted(
        (run.started for run in runs["launch"]), reverse=True
    )


@pytest.mark.parametrize(
    ("words", "source", "reason"),
    [
        ((), CLEAN, ""),
        (("--rounds=1", "--no-training"), CLEAN, "--rounds, --no-training is not as `make` runs it"),
        ((), Source("0123", ["a.py"]), "a.py is not committed"),
        ((), Source("0123", ["a.py", "b.py", "c.py"]), "a.py and 2 more is not committed"),
        ((), Source(), "this is no git clone"),
        (("--record", "--rounds=1"), Source("0123", ["a.py"]), ""),
        (("--no-record",), CLEAN, "--no-record was given"),
    ],
)
def test_default_records_whole_runs_of_a_commit(words: tuple[str, ...], source: Source, reason: str) -> None:
    assert reason_not_to_record(options(*words), source) == reason


def test_run_that_is_not_recorded_says_why(tree: Tree, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tree.source = Source("0123456789", ["a.py"])
    run_once(options("--results", str(tmp_path)))
    assert capsys.readouterr().err == "not recorded: a.py is not committed; --record records it anyway\n"
    run_once(options("--results", str(tmp_path), "--no-record"))
    assert capsys.readouterr().err == ""
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
    assert ("the machine was busy: others used" in capsys.readouterr().out) is busy


def test_work_of_containers_is_not_that_of_others(tree: Tree, tmp_path: Path) -> None:
    tree.during = 9000.0
    with recording("images", options("--results", str(tmp_path)), 5) as out:
        out.counts_children = False
    (run,) = read_runs(tmp_path)["images"]
    assert (run.busy_cpus, run.is_busy) == (None, False)


def test_record_names_files_that_changed_meanwhile(tree: Tree, tmp_path: Path) -> None:
    args = options("--record", "--rounds=1", "--no-training", "--results", str(tmp_path))
    tree.source = Source(CLEAN.commit, ["a.py"])
    with recording("launch", args, 1):
        tree.source = Source("f" * 40, ["b.py"])
    (run,) = read_runs(tmp_path)["launch"]
    assert (run.commit, run.changed) == (CLEAN.commit, ["HEAD", "a.py", "b.py"])
    assert run.command.endswith(" --rounds=1 --no-training")
    assert str(tmp_path) not in run.command


@pytest.mark.usefixtures("tree")
def test_failed_benchmark_and_foreign_file_leave_no_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = options("--results", str(tmp_path))
    with pytest.raises(RuntimeError), recording("launch", args, 1):
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
    with recording("launch", options("--results", str(tmp_path)), 1) as out:
        out.table("one rank", "s")
        for title in ("one rank", "images/s"):
            with pytest.raises(ValueError, match="a title is unique, and has no slash"):
                out.table(title, "s")


@pytest.mark.launch
@pytest.mark.slow
def test_launch_benchmark_is_recorded_for_real(tmp_path: Path) -> None:
    command = [PYTHON, "-m", "benchmarks.launch", "--rounds=1", "--record", f"--results={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "recorded in " in done.stdout
    run: Run
    (run,) = read_runs(tmp_path)["launch"]
    assert run.command == "python -m benchmarks.launch --rounds=1"
    one, two, shortest = run.tables
    assert 0 < one.samples["python"][0] < one.samples["entrypoint"][0]
    assert {len(values) for table in run.tables for values in table.samples.values()} == {1}
    assert set(two.samples) == {"torchrun", "entrypoint"}
    assert set(shortest.samples) == {"import torch", "entrypoint train"}
    assert run.before.averages
