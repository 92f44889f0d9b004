"""A rank's monitor exits as its rank does, forwards signals, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from entrypoint.supervise.admission import FirstFailure
from tests.conftest import LAUNCH_LIMIT_S, PYTHON, clean_environment, script
from tests.entrypoint.supervise.channels import have_joined, open_channel
from tests.net import free_port
from tests.processes import has_ended, next_line, state, wait_until

pytestmark = pytest.mark.launch

MONITOR = """
    import os, sys
    from entrypoint.supervise.admission import RankEndpoint
    from entrypoint.supervise import monitor
    from entrypoint.supervise.failure_channel import FailureChannel
    monitor.EXIT_WAIT_S = monitor.SIGTERM_WAIT_S = 1.0
    endpoint = RankEndpoint(0, "node1", "127.0.0.1", int(sys.argv[1]), "x")
    environment = {**os.environ, "MASTER_PORT": "61000"}
    channel = FailureChannel(endpoint, 30)
    monitor.run_guarded((sys.executable, *sys.argv[3:]), environment, channel, 30, float(sys.argv[2]))
"""


def start(folder: Path, text: str, port: int = 0, grace_s: int = 30, **environ: str) -> subprocess.Popen[str]:
    monitor, program = script(folder, "monitor_main.py", MONITOR), script(folder, "x.py", text)
    return subprocess.Popen(
        [PYTHON, str(monitor), str(port or free_port()), str(grace_s), str(program)],
        env={**clean_environment(), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("text", "code", "message"),
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
def test_monitor_rank_exits_returns_same_code(tmp_path: Path, text: str, code: int, message: str) -> None:
    process = start(tmp_path, text)
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert process.returncode == code, err
    assert message in err
    assert bool(err) is bool(message)


def test_monitor_signal_without_handler_returns_143(tmp_path: Path) -> None:
    process = start(tmp_path, "import time; print('ready', flush=True); time.sleep(60)")
    next_line(process)
    process.terminate()
    assert process.wait(LAUNCH_LIMIT_S) == 143


def test_monitor_sigterm_after_failure_keeps_first_failure(tmp_path: Path, port: int) -> None:
    process = start(tmp_path, "import time; print('ready', flush=True); time.sleep(60)", port)
    next_line(process)
    other = open_channel(1, port)
    assert have_joined(other, 1)
    other.report_exit(2, "exit code 2")
    assert process.stderr is not None  # the monitor prints when it receives the failure
    assert process.stderr.readline() == "entrypoint: error: rank 1 on node1 failed first: exit code 2\n"
    process.terminate()
    assert process.communicate(timeout=LAUNCH_LIMIT_S)[1] == ""
    assert process.returncode == 2


def test_rank_that_does_not_save_after_another_has_is_named(tmp_path: Path, port: int) -> None:
    text = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        time.sleep(600)
    """
    process = start(tmp_path, text, port, grace_s=1)
    rank = next_line(process).strip()
    other = open_channel(1, port)
    assert have_joined(other, 1)
    other.report_exit(75, "exit code 75")
    err = process.communicate(timeout=LAUNCH_LIMIT_S)[1]
    late = f"rank 0 (process {rank}) did not end within 1 s (LAUNCH_GRACE_PERIOD_S) and was killed."
    assert err == f"entrypoint: {late} What was not saved is lost.\n"


def test_monitor_tells_which_rank_its_own_has_lost(tmp_path: Path) -> None:
    file, port = tmp_path / "error.json", free_port()
    text = """
        from entrypoint.core.console import report_error
        from entrypoint.core.errors import PeerLostError
        raise SystemExit(report_error(PeerLostError("rank 0: lost rank 1, which is stopped")))
    """
    process = start(tmp_path, text, port, TORCHELASTIC_ERROR_FILE=str(file))
    other = open_channel(1, port)
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    said = "exit code 5 (rank 0: lost rank 1, which is stopped)"
    assert f"rank 0 on node1 failed first: {said}\n" in err
    wait_until(lambda: other.first_failure is not None)
    assert other.first_failure is not None
    assert other.first_failure.how == said


def test_monitor_names_its_own_rank_if_that_is_stopped(tmp_path: Path, port: int) -> None:
    process = start(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)", port)
    rank = int(next_line(process))
    os.kill(rank, signal.SIGSTOP)
    wait_until(lambda: state(rank) == "T")
    other = open_channel(1, port)
    assert have_joined(other, 1)
    other.report_exit(1, "exit code 1")
    _, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert f"entrypoint: rank 0: process {rank} is stopped (SIGSTOP)." in err


# A program with the handler for stacks, as the entrypoint starts it.
ELSEWHERE = """
    import time
    from entrypoint.core import stack_signal
    stack_signal.install()
    def own_way():
        print("ready", flush=True)
        time.sleep(60)
    own_way()
"""


def output_after_failure_elsewhere(folder: Path, lost_collective: str) -> str:
    """Have rank 1 fail while rank 0 is outside of any collective; return what rank 0's monitor prints."""
    port = free_port()
    process = start(folder, ELSEWHERE, port)
    assert next_line(process) == "ready\n"
    other = open_channel(1, port, "x")
    assert have_joined(other, 1)
    other.report_failure(FirstFailure(1, "node2", 1, "exit code 1", lost_collective=lost_collective))
    return process.communicate(timeout=LAUNCH_LIMIT_S)[1]


def test_monitor_says_where_its_rank_is_if_others_wait(tmp_path: Path) -> None:
    err = output_after_failure_elsewhere(tmp_path, "barrier at /a/y.py:3")
    file = tmp_path / "x.py"
    (line,) = [line for line in err.splitlines() if "is missing from" in line]
    place = f"on node1 is at {file}:7 in own_way"
    assert line.startswith("entrypoint: rank 0 is missing from barrier at /a/y.py:3, where rank 1 waited in vain: ")
    assert line.endswith(place)
    assert f'    File "{file}", line 7 in own_way\n    File "{file}", line 8 in <module>\n' in err


def test_monitor_of_another_failure_says_nothing_of_its_rank(tmp_path: Path) -> None:
    err = output_after_failure_elsewhere(tmp_path, "")
    assert err == "entrypoint: error: rank 1 on node2 failed first: exit code 1\n"


def test_monitor_killed_ends_its_rank(tmp_path: Path) -> None:
    process = start(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    rank = int(next_line(process))
    process.kill()
    wait_until(lambda: has_ended(rank))
