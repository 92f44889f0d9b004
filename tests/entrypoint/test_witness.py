"""The witness of a single rank: says why the kernel killed it, and is otherwise not noticed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from entrypoint.oom import Memory
from entrypoint.witness import kill_at_end
from tests.conftest import PYTHON, Entrypoint, clean_environment, script
from tests.processes import children
from tests.terminals import terminal

HOG = """
    import os
    kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
"""
LOOKS = """
    import os, sys
    try:
        os.wait()
    except ChildProcessError:
        print("no child")
    sys.stdout.flush()
    os.kill(os.getpid(), int(sys.argv[1]))
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


@pytest.fixture
def init() -> tuple[str, ...]:
    """The words that start a command as the child of PID 1."""
    tried = subprocess.run([*INIT, PYTHON, "-c", ""], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"needs a PID namespace that it may make: {tried.stderr.strip()}")
    return INIT


@pytest.mark.launch
@pytest.mark.parametrize(("below", "code"), [("a shell", -signal.SIGKILL), ("an init", 128 + signal.SIGKILL)])
def test_it_says_that_the_kernel_killed_a_single_rank(
    entrypoint: Entrypoint, limited: tuple[str, ...], request: pytest.FixtureRequest, below: str, code: int
) -> None:
    words = request.getfixturevalue("init") if below == "an init" else ()
    hog = script(entrypoint.folder, "hog.py", HOG)
    result = entrypoint(command=(*limited, *words, *COMMAND, str(hog)), env=QUIET)
    assert result.code == code, result.err
    assert result.error_lines == [
        "entrypoint: error: the kernel killed a process as the rank ended: out of memory, the 1.5 GiB that this job may"
        " use (peak 1.5 GiB); lower TRAIN_BATCH_SIZE or TRAIN_WORKERS, set TRAIN_FEED=stream, or ask for more"
    ]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("readings", "told"),
    [
        ([0, 0], False),
        ([0, 1], True),  # within the first moments
        ([0, 0, 0, 1], True),
        ([0, 0, 1, 1], True),  # a reading fell between the kill and the end of a rank that takes a while to end
        ([0, 1, 1, 1], False),
        ([1, 1, 1, 1], False),
    ],
)
def test_a_kill_is_told_whenever_the_last_reading_before_the_end_was(readings: list[int], told: bool) -> None:
    kills = iter(readings)
    waits = iter([False] * (len(readings) - 2) + [True])
    said = kill_at_end(lambda _: next(waits), lambda: Memory(next(kills), GIB, GIB))
    assert bool(said) is told
    assert next(waits, None) is None
    assert next(kills, None) is None


OLD_KILL = """
    import os, time
    child = os.fork()
    if not child:
        kept = [bytearray(os.urandom(1 << 20)) for _ in range(2000)]
    print(os.waitpid(child, 0)[1], flush=True)
    time.sleep(5)
"""


@pytest.mark.launch
@pytest.mark.parametrize("below", ["a shell", "an init"])
def test_a_kill_long_before_the_end_is_not_taken_for_its_cause(
    entrypoint: Entrypoint, limited: tuple[str, ...], request: pytest.FixtureRequest, below: str
) -> None:
    words = request.getfixturevalue("init") if below == "an init" else ()
    outlives = script(entrypoint.folder, "outlives.py", OLD_KILL)
    result = entrypoint(command=(*limited, *words, *COMMAND, str(outlives)), env=QUIET)
    assert (result.code, result.out, result.err) == (0, f"{int(signal.SIGKILL)}\n", "")


@pytest.mark.launch
@pytest.mark.parametrize("end", [0, signal.SIGTERM, signal.SIGKILL])
def test_it_is_no_child_of_the_rank_and_says_nothing_of_another_end(entrypoint: Entrypoint, end: int) -> None:
    looks = script(entrypoint.folder, "looks.py", LOOKS)
    result = entrypoint("run", looks, str(end), env={"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"})
    assert result.code == -end
    assert result.out.splitlines() == ["no child"]
    assert result.err == ""


@pytest.mark.launch
@pytest.mark.parametrize("end", [0, signal.SIGTERM, signal.SIGKILL])
def test_below_an_init_the_rank_has_no_child_either_and_its_end_is_the_commands(
    entrypoint: Entrypoint, init: tuple[str, ...], end: int
) -> None:
    looks = script(entrypoint.folder, "looks.py", LOOKS)
    result = entrypoint(command=(*init, *COMMAND, str(looks), str(end)), env=QUIET)
    assert result.code == (128 + end if end else 0)
    assert result.out.splitlines() == ["no child"]
    assert result.err == ""


COUNTS = """
    import signal, time
    heard = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, _: heard.append(signal.Signals(number).name))
    print("ready", flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until and len(heard) < 2:
        time.sleep(0.1)
    time.sleep(0.5)
    print(*heard)
"""


@pytest.mark.launch
def test_below_an_init_the_rank_hears_each_signal_once(entrypoint: Entrypoint, init: tuple[str, ...]) -> None:
    counts = script(entrypoint.folder, "counts.py", COUNTS)
    with terminal(entrypoint.folder, (*init, *COMMAND, str(counts)), QUIET) as screen:
        screen.wait_for(b"ready")
        os.write(screen.terminal, b"\x03")
        time.sleep(0.5)
        os.kill(children(screen.process)[0], signal.SIGTERM)
        assert screen.ended() == 0
    assert screen.said.replace(b"^C", b"").split()[-2:] == [b"SIGINT", b"SIGTERM"]


@pytest.mark.launch
def test_it_holds_no_file_but_where_it_would_speak(entrypoint: Entrypoint, tmp_path: Path) -> None:
    said = script(entrypoint.folder, "closes.py", "import os\nos.close(1)\nos.read(0, 1)\n")
    command = [PYTHON, "-m", "entrypoint", "run", str(said)]
    environ = {**clean_environment(), "LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "1"}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.read() == b""  # comes back only when nobody can write any more
        assert process.poll() is None
        process.communicate(b"\n", timeout=60)
    assert process.returncode == 0
