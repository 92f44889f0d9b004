"""mpirun as a child: the job's exit code is one of the table, whatever mpirun's is."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from entrypoint.launch.mpirun import StderrScanner, StopTranslator, job_exit_code
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, clean_environment, script
from tests.processes import next_line, wait_until

pytestmark = pytest.mark.launch

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.mark.parametrize(
    ("code", "asked", "said", "ends_with"),
    [
        (0, [], "", 0),
        (7, [], "", 7),
        (5, [], "", 5),
        (255, [], "ORTE has lost communication with a remote daemon", 5),
        (255, [], 'entrypoint-status: {"first_failure": 255}', 255),
        (-9, [], "", 5),
        (137, [], "", 5),
        (75, [], 'entrypoint-status: {"preempted": true}', 75),
        (0, [TERM], 'entrypoint-status: {"preempted": true}', 75),
        (143, [USR1], '[1,0]<stderr>:entrypoint-status: {"preempted": true}', 75),
        (0, [TERM], "", 143),
        (0, [USR1], "", 0),
        (-2, [signal.SIGINT], "", 130),
        (143, [TERM], "", 143),
        (2, [], 'entrypoint-status: {"first_failure": 2}', 2),
    ],
)
def test_mpirun_exit_code_follows_ranks(code: int, asked: list[int], said: str, ends_with: int) -> None:
    scanner, shown = StderrScanner(), b""
    for start in range(0, len(said), 7):  # in pieces, as a pipe gives it
        shown += scanner.feed(said[start : start + 7].encode())
    shown += scanner.feed(b"\n")
    assert job_exit_code(code, asked, scanner) == ends_with
    assert b"first_failure" not in shown
    assert shown.decode().strip("\n") == ("" if said.startswith("entrypoint-status") else shown.decode().strip("\n"))


def test_mpirun_other_output_is_forwarded_immediately() -> None:
    scanner = StderrScanner()
    assert scanner.feed(b"50 %\r") == b"50 %\r"
    assert scanner.feed(b"name? ent") == b"name? "
    assert scanner.feed(b"ry\nentrypoint-status: no record\n") == b"entry\nentrypoint-status: no record\n"
    assert scanner.feed(b'entrypoint-status: {"preempted": true}\nover') == b"over"
    assert scanner.preempted


RUN = """
    import os, sys
    from entrypoint.launch.mpirun import supervise_mpirun
    more = {"saves": True, "grace_s": float(sys.argv[2])} if sys.argv[2:] else {}
    sys.exit(supervise_mpirun(("/bin/sh", sys.argv[1]), dict(os.environ), **more))
"""
HEARS = """
    trap 'echo INT' INT; trap 'echo USR1' USR1; trap 'echo TERM; sleep 1; exit' TERM
    echo ready; for i in $(seq 600); do sleep 0.1; done
"""


def start(folder: Path, text: str, *grace_s: str) -> subprocess.Popen[str]:
    main, mpirun = script(folder, "main.py", RUN), script(folder, "mpirun.sh", text)
    return subprocess.Popen(
        [PYTHON, str(main), str(mpirun), *grace_s],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_mpirun_output_is_complete(tmp_path: Path) -> None:
    text = "seq 50000 >&2; echo out; printf 'no newline' >&2; exit 3"
    out, err = (process := start(tmp_path, text)).communicate(timeout=LAUNCH_LIMIT_S)
    assert (process.returncode, out) == (3, "out\n")
    assert err == "".join(f"{number}\n" for number in range(1, 50001)) + "no newline"


def test_mpirun_signal_forwarded_orphans_not_awaited(tmp_path: Path) -> None:
    text = "trap 'echo preempted soon >&2; exit 0' TERM; sleep 60 & echo ready; while :; do sleep 0.1; done"
    process = start(tmp_path, text)
    assert next_line(process) == "ready\n"
    began = time.monotonic()
    process.terminate()
    assert process.wait(LAUNCH_LIMIT_S) == 143
    assert time.monotonic() - began < 20, "its sleeping child still holds standard error"


@pytest.mark.slow_except("2-sent2")
@pytest.mark.parametrize(
    ("grace_s", "sent", "heard"),
    [
        ("60", [TERM, TERM], ["USR1", "TERM"]),
        ("60", [signal.SIGHUP, signal.SIGINT, TERM], ["USR1", "INT", "TERM"]),
        ("2", [signal.SIGINT], ["USR1", "TERM"]),
    ],
)
def test_mpirun_stop_warns_first_then_terminates(
    tmp_path: Path, grace_s: str, sent: list[int], heard: list[str]
) -> None:
    process = start(tmp_path, HEARS, grace_s)
    assert next_line(process) == "ready\n"
    for number, name in zip(sent, heard, strict=False):
        process.send_signal(number)
        assert next_line(process) == f"{name}\n"
        time.sleep(1.2)
    assert process.wait(LAUNCH_LIMIT_S) == 128 + sent[0]
    out, err = process.communicate()
    assert out.split() == heard[len(sent) :]
    late = f"entrypoint: mpirun did not end within {grace_s} s (LAUNCH_GRACE_PERIOD_S) and was terminated. "
    assert err == (f"{late}What was not saved is lost.\n" if grace_s == "2" else "")


def test_stop_translator_duplicate_signal_counts_once() -> None:
    asking = StopTranslator()
    reported = [asking(number) for number in (signal.SIGUSR2, signal.SIGHUP, TERM, signal.SIGUSR2, TERM)]
    assert reported == [signal.SIGUSR2, USR1, USR1, signal.SIGUSR2, USR1]
    asking.since -= 2
    assert asking(TERM) == TERM


def test_mpirun_ends_with_its_parent(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    process = start(tmp_path, f"trap 'touch {ended}; exit' TERM; echo ready; while :; do sleep 0.1; done")
    next_line(process)
    process.kill()
    wait_until(ended.exists)
