"""Runs rows one after the other within a budget of time, and keeps what each gave; a later call goes on."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stream.measure import descendants

# The variable that names the file to which a row adds its samples, one JSON object a line.
SAMPLES = "GPU_PROOF_SAMPLES"
# The variable with the moment, on the monotonic clock, until which a row's own commands must have ended.
UNTIL = "GPU_PROOF_UNTIL"
GRACE_S = 3.0
DONE, FAILED, NOT_RUN = "done", "failed", "not run"
FILES = ("rows.jsonl", "rows.txt", "log.txt")


@dataclass(frozen=True)
class Job:
    """A row as a command that may take so many seconds."""

    name: str
    limit_s: float
    command: Sequence[str]


@dataclass(frozen=True)
class Result:
    """What a row gave; `key` names device, versions and commit, and `error` is the last line of a failure."""

    row: str
    state: str
    seconds: float
    error: str = ""
    samples: list[dict[str, Any]] = field(default_factory=list)
    key: str = ""

    def line(self) -> str:
        """Return the result as a line to read."""
        return f"{self.state:<8} {self.row:<18}{self.seconds:>6.0f} s  {self.error or summary(self.samples)}".rstrip()


def summary(samples: Iterable[Mapping[str, Any]]) -> str:
    """Return the medians of a row's samples by table, what is missing, and the last line of each output."""
    values: dict[str, dict[str, list[float]]] = {}
    other: list[str] = []
    for sample in samples:
        if "value" in sample:
            table = values.setdefault(f"{sample['table']} [{sample['unit']}]", {})
            table.setdefault(sample["variant"], []).append(sample["value"])
        elif "missing" in sample:
            other.append(f"{sample['variant']}: {sample['missing']}")
        else:
            other.append(f"{sample['fact']}: {(sample['lines'] or ['nothing'])[-1]}")
    tables = [
        f"{title}: {', '.join(f'{name} {statistics.median(numbers):,.5g}' for name, numbers in variants.items())}"
        for title, variants in values.items()
    ]
    return "; ".join([*tables, *other])


class Ledger:
    """The results in a folder, of which another folder gets a copy after each row."""

    def __init__(self, folder: Path, copy: Path | None, key: str) -> None:
        self.folder, self.copy, self.key = folder, copy, key
        for place in (folder, copy):
            if place:
                place.mkdir(parents=True, exist_ok=True)

    def states(self) -> dict[str, str]:
        """Return the newest state of each row with this key; a row that did not run later keeps its state."""
        states: dict[str, str] = {}
        with contextlib.suppress(FileNotFoundError):
            for line in (self.folder / FILES[0]).read_text().splitlines():
                result = json.loads(line)
                if result["key"] == self.key and (result["state"] != NOT_RUN or result["row"] not in states):
                    states[result["row"]] = result["state"]
        return states

    def add(self, result: Result) -> None:
        """Append a result, and copy all files."""
        for name, text in zip(FILES, (json.dumps(asdict(result), ensure_ascii=False), result.line()), strict=False):
            with (self.folder / name).open("a") as file:
                file.write(f"{text}\n")
        print(result.line(), flush=True)
        for name in FILES if self.copy and self.copy.resolve() != self.folder.resolve() else ():
            if self.copy and (self.folder / name).exists():
                shutil.copy(self.folder / name, self.copy)


def in_order(jobs: Sequence[Job], states: Mapping[str, str]) -> list[Job]:
    """Return the jobs that are still to run: those that never ran, then those that failed."""
    fresh = [job for job in jobs if states.get(job.name, NOT_RUN) == NOT_RUN]
    return fresh + [job for job in jobs if states.get(job.name) == FAILED]


def run_all(
    jobs: Sequence[Job], ledger: Ledger, budget_s: float, clock: Callable[[], float] = time.monotonic
) -> dict[str, str]:
    """Run the jobs of `in_order` that fit into the budget, and return the newest states."""
    until = clock() + budget_s
    for job in in_order(jobs, ledger.states()):
        remaining = until - clock()
        if job.limit_s > remaining:
            reason = f"may take {job.limit_s:.0f} s, and {max(0, remaining):.0f} s are left"
            ledger.add(Result(job.name, NOT_RUN, 0, reason, key=ledger.key))
        else:
            ledger.add(run_one(job, ledger))
    return ledger.states()


def run_one(job: Job, ledger: Ledger) -> Result:
    """Run a job to its end or its limit, and return what it gave until then."""
    log, samples = ledger.folder / FILES[2], ledger.folder / "samples.jsonl"
    samples.unlink(missing_ok=True)
    with log.open("a") as file:
        file.write(f"\n== {job.name}\n")
        file.flush()
        before, started = file.tell(), time.monotonic()
        until = str(started + job.limit_s - GRACE_S)  # what a command printed is kept before its row is ended
        environ = {**os.environ, SAMPLES: str(samples), UNTIL: until, "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            job.command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environ, start_new_session=True
        )
        try:
            code, error = process.wait(job.limit_s), ""
        except subprocess.TimeoutExpired:
            end_tree(process)
            code, error = 1, f"took more than {job.limit_s:.0f} s"
        seconds = time.monotonic() - started
    if code and not error:
        with log.open("rb") as file:
            file.seek(before)
            lines = file.read().decode(errors="replace").strip().splitlines()
        error = lines[-1] if lines else f"ended with {code}"
    found = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    return Result(job.name, FAILED if code else DONE, round(seconds, 1), error, found, ledger.key)


def end_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all below it: ranks are sessions of their own."""
    tree = descendants(process.pid)
    for kind, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        for number in tree if kind == signal.SIGKILL else tree[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
