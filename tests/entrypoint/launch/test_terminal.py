"""What is typed at a terminal reaches ranks that are sessions of their own, and all that they have started."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time

import pytest

from tests.conftest import PYTHON, Entrypoint, needs_two_cores, script
from tests.processes import has_ended, state, wait_until
from tests.terminals import Terminal, terminal

CTRL_C, CTRL_BACKSLASH, CTRL_Z = b"\x03", b"\x1c", b"\x1a"
QUIET = {"LAUNCH_QUIET": "1", "LAUNCH_NPROC_PER_NODE": "2"}
COMMAND = (PYTHON, "-m", "entrypoint", "run", "x.py")
SAID = re.compile(rb"rank \d is (\d+)(?: with (\d+))? under (\d+)\r\n")
# Says who it and the child are that it starts, and goes on; the child says what it hears.
PROGRAM = """
    import os, signal, sys, time

    def heard(number, _):
        os.write(1, f"a child heard {signal.Signals(number).name}\\n".encode())
        os._exit(0)

    rank, child = os.environ["RANK"], os.fork()
    if not child:
        for number in (signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, heard)
    else:
        time.sleep(0.2)
        os.write(1, f"rank {rank} is {os.getpid()} with {child} under {os.getppid()}\\n".encode())
    while True:
        time.sleep(0.05)
"""


def shell(entrypoint: Entrypoint) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return a shell that has jobs, and its environment."""
    return ("/bin/bash", "--norc", "--noprofile", "-i"), {**QUIET, "HOME": str(entrypoint.home), "PS1": "$ "}


def processes(screen: Terminal) -> list[int]:
    """Return the ids of the launcher, then of both ranks and their children, when all have said who they are."""
    while len(found := SAID.findall(screen.said)) < 2:
        assert screen.read(), screen.said.decode()
    assert len({launcher for *_, launcher in found}) == 1
    return [int(found[0][-1]), *(int(pid) for *ranks, _ in found for pid in ranks if pid)]


@pytest.mark.launch
@needs_two_cores
@pytest.mark.parametrize(("key", "name"), [(CTRL_C, "SIGINT"), (CTRL_BACKSLASH, "SIGQUIT")])
def test_terminal_stop_key_reaches_children_of_ranks(entrypoint: Entrypoint, key: bytes, name: str) -> None:
    script(entrypoint.folder, "x.py", PROGRAM)
    with terminal(entrypoint.folder, COMMAND, {**QUIET, "HOME": str(entrypoint.home)}) as screen:
        ranks = processes(screen)
        os.write(screen.terminal, key)
        assert screen.ended() == 128 + signal.Signals[name]
        assert screen.said.count(f"a child heard {name}".encode()) == 2
        assert screen.said.endswith(f"entrypoint: error: stopped by {name}\r\n".encode())
        wait_until(lambda: all(map(has_ended, ranks)))


@pytest.mark.launch
@needs_two_cores
def test_terminal_ctrl_z_suspends_all_and_fg_resumes(entrypoint: Entrypoint) -> None:
    script(entrypoint.folder, "x.py", PROGRAM)
    with terminal(entrypoint.folder, *shell(entrypoint)) as screen:
        os.write(screen.terminal, f"{shlex.join(COMMAND)}\n".encode())
        ranks = processes(screen)
        assert len(ranks) == 5
        os.write(screen.terminal, CTRL_Z)
        screen.wait_for(b"Stopped")
        wait_until(lambda: [state(pid) for pid in ranks] == ["T"] * 5)  # one that waits for a CPU stops when it has one
        os.write(screen.terminal, b"fg\n")
        wait_until(lambda: "T" not in [state(pid) for pid in ranks])
        os.write(screen.terminal, CTRL_C)
        screen.wait_for(b"stopped by SIGINT")
        os.write(screen.terminal, b"exit\n")
        assert screen.ended() == 130


@pytest.mark.launch
@needs_two_cores
def test_suspend_without_job_control_is_ignored(entrypoint: Entrypoint) -> None:
    # As in a container with a terminal: its first process has no shell that would see it stopped.
    script(entrypoint.folder, "x.py", PROGRAM)
    with terminal(entrypoint.folder, COMMAND, {**QUIET, "HOME": str(entrypoint.home)}) as screen:
        ranks = processes(screen)
        os.write(screen.terminal, CTRL_Z)
        time.sleep(0.5)  # what must not happen has its time
        assert "T" not in [state(pid) for pid in ranks]
        os.write(screen.terminal, CTRL_C)
        assert screen.ended() == 128 + signal.SIGINT


@pytest.mark.slow
@pytest.mark.launch
@needs_two_cores
def test_suspend_extends_grace_period(entrypoint: Entrypoint) -> None:
    script(
        entrypoint.folder,
        "x.py",
        """
        import os, signal, sys, time

        def save(*_):
            os.write(1, b"saving\\n")  # print() may be where the signal comes
            time.sleep(2)
            os.write(1, b"saved\\n")
            sys.exit(0)

        signal.signal(signal.SIGTERM, save)
        os.write(1, f"rank {os.environ['RANK']} is {os.getpid()} under {os.getppid()}\\n".encode())
        while True:
            time.sleep(0.05)
        """,
    )
    command, env = shell(entrypoint)
    with terminal(entrypoint.folder, command, {**env, "LAUNCH_GRACE_PERIOD_S": "5"}) as screen:
        os.write(screen.terminal, f"{shlex.join(COMMAND)}\n".encode())
        launcher, *_ = processes(screen)
        os.kill(launcher, signal.SIGTERM)
        screen.wait_for(b"saving")
        os.write(screen.terminal, CTRL_Z)
        screen.wait_for(b"Stopped")
        time.sleep(6)  # longer than they have to save
        os.write(screen.terminal, b"fg; echo code $?\n")
        screen.wait_for(b"code 0")
        assert screen.said.count(b"saved\r\n") == 2
        os.write(screen.terminal, b"exit\n")
        screen.ended()
