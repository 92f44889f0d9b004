"""A rank's guard ends as its rank does, passes signals on, and leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from entrypoint.core.errors import describe_exit
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, clean_environment, script
from tests.entrypoint.supervise.channels import bond, joined
from tests.net import free_port
from tests.processes import has_ended, wait_until

pytestmark = pytest.mark.launch

GUARD = """
    import os, sys
    from entrypoint.supervise.failure_channel import FailureChannel, RankEndpoint
    from entrypoint.supervise.monitor import run_guarded
    place = RankEndpoint(0, "node1", "127.0.0.1", (int(sys.argv[1]),), "x")
    environ = {**os.environ, "MASTER_PORT": "61000"}
    run_guarded((sys.executable, *sys.argv[2:]), environ, FailureChannel(place, 30), 30, 30)
"""


def start(folder: Path, text: str, port: int = 0) -> subprocess.Popen[str]:
    guard, program = script(folder, "guard_main.py", GUARD), script(folder, "x.py", text)
    return subprocess.Popen(
        [PYTHON, str(guard), str(port or free_port()), str(program)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('done')", 0, ""),
        ("raise SystemExit(9)", 9, "rank 0 on node1 failed first: exit code 9"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
            5,
            "failed first: killed by SIGKILL; the kernel does",
        ),
        ("raise SystemExit(75)", 75, ""),
    ],
)
def test_it_ends_as_its_rank_did(tmp_path: Path, text: str, code: int, said: str) -> None:
    process = start(tmp_path, text)
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert process.returncode == code, err
    assert said in err
    assert bool(err) is bool(said)


def test_a_signal_reaches_the_rank_and_its_answer_counts(tmp_path: Path) -> None:
    text = """
        import signal, sys, time
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
        print("ready", flush=True)
        while True:
            time.sleep(0.05)
    """
    process = start(tmp_path, text)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(LAUNCH_LIMIT_S) == 75


def test_a_rank_without_a_handler_ends_by_the_launchers_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(LAUNCH_LIMIT_S) == 143


@pytest.mark.parametrize(("first", "code"), [(9, 5), (2, 2), (143, 143)])
def test_a_launcher_that_ends_the_others_after_a_failure_does_not_hide_it(
    tmp_path: Path, first: int, code: int
) -> None:
    port = free_port()
    process = start(tmp_path, "import time; print('ready', flush=True); time.sleep(60)", port)
    assert process.stdout is not None
    process.stdout.readline()
    other = bond(1, (port,))
    assert joined(other, 1)
    other.ended(first, f"exit code {first}")
    assert process.stderr is not None  # which tells as soon as the guard has heard of it
    assert process.stderr.readline() == f"entrypoint: error: rank 1 on node1 failed first: exit code {first}\n"
    process.terminate()
    assert process.communicate(timeout=LAUNCH_LIMIT_S)[1] == ""
    assert process.returncode == code


def test_where_the_guard_is_killed_its_rank_ends(tmp_path: Path) -> None:
    process = start(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    assert process.stdout is not None
    rank = int(process.stdout.readline())
    process.kill()
    wait_until(lambda: has_ended(rank))


@pytest.mark.parametrize(
    ("code", "said"),
    [(3, "exit code 3"), (-signal.SIGSEGV, "killed by SIGSEGV"), (-9, "killed by SIGKILL; ")],
)
def test_how_a_rank_ended_is_told_in_words(code: int, said: str) -> None:
    assert describe_exit(code).startswith(said)
