"""Any command line ends with a documented exit code and lines of the entrypoint: no traceback, and no hang.

COMMAND_LINES says how many cases are tried in this process, and COMMAND_LINE_PROCESSES how many as processes.
`python -m tests.entrypoint.cli.command_lines FIRST COUNT` tries any others as processes.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import TimeoutExpired
from types import FrameType
from typing import NoReturn
from unittest.mock import patch

import pytest

from entrypoint.cli import main
from tests.conftest import FUZZ_EXAMPLES
from tests.entrypoint.cli.command_lines import Case, environment_of, judge, make_case, populate, run_as_process

IN_THIS_PROCESS = int(os.environ.get("COMMAND_LINES", FUZZ_EXAMPLES))
AS_PROCESSES = int(os.environ.get("COMMAND_LINE_PROCESSES", "20"))
# Cases after this one are tried in one process: no case is tried in both ways.
FIRST_IN_THIS_PROCESS = 10_000
# A case takes a tenth of a second; a machine that other suites use is slower.
LIMIT_S = 60
SHARE = 100


class Hangs(BaseException):
    """Raised in a case that does not end; no handler of the entrypoint catches it."""


def stop(_: int, __: FrameType | None) -> NoReturn:
    raise Hangs


def start_nothing(*_: object, **__: object) -> NoReturn:
    """Take the place of what starts a program."""
    raise SystemExit(0)


def try_nothing(*_: object, **__: object) -> NoReturn:
    """Take the place of a probe in a child process, which imports torch."""
    raise TimeoutExpired("probe", 0)


@contextmanager
def around(case: Case, folder: Path, removed: Path) -> Iterator[None]:
    """Set environment, working folder and time limit of a case, and start no other process."""
    starts = ["entrypoint.cli.commands.train_run.launch", "os.execve"]
    patches = [patch(name, start_nothing) for name in (*starts, "entrypoint.tune.search.run_trial")]
    patches += [patch("subprocess.run", try_nothing)]
    patches += [patch("entrypoint.machine.comm_backends.try_oneccl", lambda *_, **__: "not tried")]
    patches += [patch.dict(os.environ, environment_of(case, folder), clear=True), patch("sys.argv", ["x", *case.words])]
    before, tempfile.tempdir = (tempfile.tempdir, Path.cwd(), signal.getsignal(signal.SIGTERM)), None
    for one in patches:
        one.start()
    if case.removed_folder:
        removed.mkdir()
    os.chdir(removed if case.removed_folder else folder)
    if case.removed_folder:
        removed.rmdir()
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        for one in reversed(patches):
            one.stop()
        tempfile.tempdir, here, handler = before
        os.chdir(here)
        signal.signal(signal.SIGTERM, handler)


def run_here(case: Case, folder: Path, removed: Path) -> list[str]:
    """Run a case in this process and return what is wrong with it."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace") for _ in range(2)]
    kept = sys.stdout, sys.stderr
    with around(case, folder, removed):
        sys.stdout, sys.stderr = streams
        try:
            code = main.main()
        except SystemExit as end:
            code = int(end.code or 0)
        except Hangs:
            return ["hangs"]
        finally:
            sys.stdout, sys.stderr = kept
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read())
    return judge(case, code, *texts)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "cases"
    place.mkdir()
    populate(place)
    return place


def shares(first: int, count: int) -> list[range]:
    """Return the numbers of cases in ranges of up to `SHARE`."""
    end = first + count
    return [range(start, min(start + SHARE, end)) for start in range(first, end, SHARE)]


@pytest.mark.generated
@pytest.mark.parametrize("numbers", shares(FIRST_IN_THIS_PROCESS, IN_THIS_PROCESS), ids=lambda one: str(one.start))
def test_command_lines_in_one_process_end_as_documented(folder: Path, tmp_path: Path, numbers: range) -> None:
    for number in numbers:
        case = make_case(number)
        if case.words != ("rank",):
            assert run_here(case, folder, tmp_path / "gone") == [], case


@pytest.mark.launch
@pytest.mark.generated
@pytest.mark.parametrize("numbers", shares(0, AS_PROCESSES), ids=lambda one: str(one.start))
def test_command_lines_as_processes_end_as_documented(numbers: range) -> None:
    for number in numbers:
        case = make_case(number)
        assert run_as_process(case) == [], case


@pytest.mark.parametrize(
    ("code", "out", "err", "said"),
    [
        (1, "", "Traceback (most recent call last):\n  x\n", "Traceback"),
        (120, "", "Exception ignored in: <stdout>", "Exception ignored"),
        (2, "", "", "exit code 2 and no error"),
        (0, "", "wrong\n", "not a line of ours"),
        (2, "", "entrypoint: error: \x1b[2J\n", "not printable"),
        (9, "", "entrypoint: error: x\n", "exit code 9"),
    ],
)
def test_judge_names_each_fault(code: int, out: str, err: str, said: str) -> None:
    found = judge(Case(0, ("plan",)), code, out, err)
    assert any(said in line for line in found), found
    assert judge(Case(0, ("plan",)), 2, "", "entrypoint: error: x\n") == []
