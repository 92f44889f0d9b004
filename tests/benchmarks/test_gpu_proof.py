"""How `make gpu-proof` keeps its time, goes on after failures and in a second call, and what its rows write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_proof.__main__ import MINUTES, rows
from benchmarks.gpu_proof.board import DONE, FAILED, NOT_RUN, SAMPLES, Job, Ledger, run_all
from benchmarks.gpu_proof.kit import FILES, LOCK, WHEELS, locked_version, variables
from tests.conftest import PYTHON, clean_environment

SAMPLE = f"""
import os
open(os.environ["{SAMPLES}"], "a").write('{{"table": "a", "unit": "s", "variant": "b", "value": 2.5}}\\n')
"""
CODES = {
    "first": (9.0, SAMPLE),
    "fails": (9.0, "print('a line'); raise SystemExit('no such card')"),
    "hangs": (1.0, f"{SAMPLE}import time; time.sleep(60)"),
    "large": (9e4, "pass"),
    "last": (9.0, SAMPLE.replace('"value": 2.5', '"missing": "no card"')),
}
JOBS = [Job(name, limit_s, [PYTHON, "-c", code]) for name, (limit_s, code) in CODES.items()]


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.mark.launch
def test_calls_keep_the_budget_and_go_on(tmp_path: Path) -> None:
    folder, out = tmp_path / "results", tmp_path / "out"
    states = run_all(JOBS, Ledger(folder, out, "card"), 90)
    assert states == {"first": DONE, "fails": FAILED, "hangs": FAILED, "large": NOT_RUN, "last": DONE}
    errors = [result["error"] for result in results(folder)]
    assert errors[:3] == ["", "no such card", "took more than 1 s"]
    assert errors[3].startswith("may take 90000 s, and ")
    assert [len(result["samples"]) for result in results(folder)] == [1, 0, 1, 0, 1]
    lines = (folder / "rows.txt").read_text().splitlines()
    assert lines[0].endswith("a [s]: b 2.5")
    assert lines[4].endswith("b: no card")
    assert "a line" in (folder / "log.txt").read_text()
    assert {path.name: path.read_text() for path in out.iterdir()} == {
        path.name: path.read_text() for path in folder.iterdir() if path.name != "samples.jsonl"
    }
    again = run_all(JOBS, Ledger(folder, out, "card"), 1e6)
    assert again == {**states, "large": DONE}
    assert [result["row"] for result in results(folder)[5:]] == ["large", "fails", "hangs"], (
        "those that failed come last"
    )
    assert Ledger(folder, None, "another card").states() == {}


def test_each_row_fits_into_a_call_and_all_into_two() -> None:
    limits = [limit_s for limit_s, _ in rows().values()]
    assert max(limits) <= 60 * MINUTES / 3
    assert sum(limits) <= 2.6 * 60 * MINUTES, "rows rarely take as long as their limit"


def test_kit_names_its_files_unless_variables_are_set(tmp_path: Path) -> None:
    (tmp_path / FILES["AIRBENCH94"]).touch()
    assert variables(tmp_path, {}) == {"AIRBENCH94": str(tmp_path / "airbench94.py")}
    assert variables(tmp_path, {"AIRBENCH94": "mine.py"}) == {}
    assert all(fixed or locked_version(name, LOCK.read_text()) for name, fixed in WHEELS.items())


@pytest.mark.launch
@pytest.mark.usefixtures("torchvision")
def test_dry_run_of_rows_and_their_resumption(tmp_path: Path) -> None:
    words = [PYTHON, "-m", "benchmarks.gpu_proof", "--dry-run", f"--folder={tmp_path}", f"--kit={tmp_path / 'none'}"]
    environ = {**clean_environment(), "OUT": str(tmp_path / "out")}
    for _ in range(2):
        done = subprocess.run(
            [*words, "--only", "out-of-memory", "transfer"], env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "log.txt").read_text()
        assert "2 of 2 rows are done" in done.stdout
    memory, transfer = results(tmp_path / "out")
    assert memory["row"] == "out-of-memory"
    assert any("memory" in line for sample in memory["samples"] for line in sample["lines"])
    assert {sample["variant"] for sample in transfer["samples"]} == {"pageable", "pinned", "pinned, non-blocking"}
    assert transfer["key"].startswith("dry run on a CPU, torch ")
