"""One rank as a supervised child: its exit code, signals, terminal, and the report of an OOM kill."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON, Entrypoint, clean_environment, script
from tests.processes import children, killed_at_end, next_line, state, wait_until
from tests.terminals import terminal

HOG = """
    import os
    kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
"""
COMMAND = (PYTHON, "-m", "entrypoint", "run")
QUIET = {"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"}
# A container's init: PID 1, which ends with its only child, and everything else with it.
INIT = ("unshare", "--pid", "--fork", "--mount-proc", PYTHON, "-c", """if True:
    import os, signal, sys
    child = os.fork()
    if not child:
        os.execv(sys.argv[1], sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(child, number) if number == signal.SIGTERM else None)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
""")  # fmt: skip
PID_1 = ("unshare", "--pid", "--fork", "--mount-proc")


def needs_pid_namespace() -> None:
    tried = subprocess.run([*INIT, PYTHON, "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a PID namespace that it may make: {tried.stderr.strip()}")


@pytest.fixture(params=["a shell", pytest.param("an init", marks=pytest.mark.slow), "nobody"])
def below(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """The words that start a command as a shell's child, as the child of PID 1, and as PID 1 itself."""
    if request.param != "a shell":
        needs_pid_namespace()
    return {"a shell": (), "an init": INIT, "nobody": PID_1}[request.param]


@pytest.mark.slow_except("nobody")
@pytest.mark.launch
def test_oom_kill_is_reported_with_limit_and_code_5(
    entrypoint: Entrypoint, limited: tuple[str, ...], below: tuple[str, ...]
) -> None:
    hog = script(entrypoint.folder, "hog.py", HOG)
    assert "killed by SIGKILL: out of memory, the 1.5 GiB that this job may use" in entrypoint.error_line(
        command=(*limited, *below, *COMMAND, str(hog)), env=QUIET, code=5
    )


OLD_KILL = """
    import os, time
    child = os.fork()
    if not child:
        kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
@pytest.mark.launch
def test_oom_kill_of_a_child_does_not_change_the_exit_code(entrypoint: Entrypoint, limited: tuple[str, ...]) -> None:
    outlives = script(entrypoint.folder, "outlives.py", OLD_KILL)
    result = entrypoint(command=(*limited, *COMMAND, str(outlives)), env=QUIET)
    assert (result.code, result.out, result.err) == (0, f"{int(signal.SIGKILL)}\n", "")


ENDS = """
    import os, sys
    how, number = sys.argv[1], int(sys.argv[2])
    sys.stdout.flush()
    sys.exit(number) if how == "exit" else os.kill(os.getpid(), number)
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("how", "number", "code", "said"),
    [
        ("exit", 75, 75, ""),
        ("exit", 99, 99, ""),
        ("kill", signal.SIGSEGV, 5, "failed first: killed by SIGSEGV"),
        ("kill", signal.SIGTERM, 5, "failed first: killed by SIGTERM"),
    ],
)
def test_own_exit_code_is_kept_and_a_signal_is_named(
    entrypoint: Entrypoint, below: tuple[str, ...], how: str, number: int, code: int, said: str
) -> None:
    ends = script(entrypoint.folder, "ends.py", ENDS)
    result = entrypoint(command=(*below, *COMMAND, str(ends), how, str(int(number))), env=QUIET)
    assert result.code == code
    assert said in result.err
    assert bool(result.err) is bool(said)


COUNTS = """
    import signal, sys, time
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
    print("ready", sys.stdin.isatty(), flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and len(heard) < 2:
        time.sleep(0.1)
    time.sleep(0.5)
    print(*heard)
"""


@pytest.mark.launch
@pytest.mark.parametrize("init", [False, True])
def test_each_signal_is_received_once(entrypoint: Entrypoint, init: bool) -> None:
    if init:
        needs_pid_namespace()
    counts = script(entrypoint.folder, "counts.py", COUNTS)
    with terminal(entrypoint.folder, (*(INIT if init else ()), *COMMAND, str(counts)), QUIET) as screen:
        screen.wait_for(b"ready True")
        os.write(screen.terminal, b"\x03")
        time.sleep(0.5)
        os.kill(children(screen.process)[0] if init else screen.process, signal.SIGTERM)
        assert screen.ended() == 0
    assert screen.said.replace(b"^C", b"").split()[-2:] == [b"SIGINT", b"SIGTERM"]


ASKS = """
    import getpass
    print("hello", input("name? "))
    print("secret", getpass.getpass("word? "))
"""


@pytest.mark.launch
def test_script_can_read_from_the_terminal(entrypoint: Entrypoint) -> None:
    asks = script(entrypoint.folder, "asks.py", ASKS)
    with terminal(entrypoint.folder, (*COMMAND, str(asks)), QUIET) as screen:
        screen.wait_for(b"name? ")
        os.write(screen.terminal, b"Ada\n")
        screen.wait_for(b"word? ")
        os.write(screen.terminal, b"xyzzy\n")
        assert screen.ended() == 0
    assert b"hello Ada" in screen.said
    assert b"secret xyzzy" in screen.said


@pytest.mark.launch
def test_ctrl_z_stops_parent_and_rank_and_fg_resumes_both(entrypoint: Entrypoint) -> None:
    counts = script(entrypoint.folder, "counts.py", COUNTS)
    shell = ("bash", "-c", 'set -m; "$@"; echo stopped; fg; echo over', "bash", *COMMAND, str(counts))
    with terminal(entrypoint.folder, shell, QUIET) as screen:
        screen.wait_for(b"ready True")
        (parent,) = children(screen.process)
        (rank,) = children(parent)
        os.write(screen.terminal, b"\x1a")
        screen.wait_for(b"stopped")
        wait_until(lambda: state(parent) != "T" and state(rank) != "T")  # the rank may stop later than its parent
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(parent, number)
            time.sleep(0.5)
        screen.wait_for(b"over")
    assert b"SIGTERM SIGUSR1" in screen.said


@pytest.mark.launch
def test_parent_holds_no_torch_and_is_named_for_ps(entrypoint: Entrypoint, tmp_path: Path) -> None:
    waits = script(entrypoint.folder, "waits.py", "import sys\nprint('ready', flush=True)\nsys.stdin.read(1)\n")
    environ = {**clean_environment(), **QUIET}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with killed_at_end([*COMMAND, str(waits)], env=environ, cwd=tmp_path, **pipes) as process:
        assert next_line(process) == b"ready\n"
        assert "torch" not in Path(f"/proc/{process.pid}/maps").read_text()
        assert Path(f"/proc/{process.pid}/comm").read_text() == "ep-agent\n"
        process.communicate(b"\n", timeout=LAUNCH_LIMIT_S)
    assert process.returncode == 0


@pytest.mark.launch
def test_variable_of_another_launcher_in_the_script_is_named(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", "import os\nprint(os.environ['OMPI_COMM_WORLD_RANK'])")
    shown = " ".join(entrypoint("plan", "run", "x.py").out.split())
    assert "warning: the script reads OMPI_COMM_WORLD_RANK, which this launcher does not set" in shown
    script(entrypoint.folder, "y.py", "import os\nprint(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['RANK'])")
    assert "the script reads" not in entrypoint("plan", "run", "y.py").out
