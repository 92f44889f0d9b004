"""Forked processes end quietly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON
from train.data.workers import translate_worker_death, worker_lost_error

# A forked worker of a parent that answers SIGTERM with an exception, as the trainer does.
FORK = """
    import os, signal, sys, time
    from train.preemption import STOP_CONTROLLER
    from train.data.workers import restore_default_signals

    STOP_CONTROLLER.install()
    child = os.fork()
    if child == 0:
        if sys.argv[1] == "undo":
            restore_default_signals()
        print("ready", flush=True)
        for _ in range(600):
            time.sleep(0.05)  # a signal just before a sleep is handled after it
        os._exit(0)
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize(("what", "quiet"), [("undo", True), ("keep", False)])
def test_terminated_worker_prints_nothing(what: str, quiet: bool) -> None:
    process = subprocess.Popen(
        [PYTHON, "-c", textwrap.dedent(FORK), what], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = sorted(process.stdout.readline().strip() for _ in range(2))
    assert lines[1] == "ready"
    os.kill(int(lines[0]), signal.SIGTERM)
    out, err = process.communicate(timeout=LAUNCH_LIMIT_S)
    assert ("Traceback" not in err) is quiet
    assert (int(out) == -signal.SIGTERM) is quiet


# A batch that is offered and not fetched, since its rank is gone.
OFFER = """
    import os, sys, time
    from multiprocessing import current_process, resource_sharer
    from multiprocessing.connection import Client
    from train.data.workers import init_loader_worker

    if sys.argv[1] == "undo":
        init_loader_worker(os.sched_getaffinity(0))
    address, key = resource_sharer.DupFd(1)._id
    Client(address, authkey=current_process().authkey).close()
    time.sleep(0.5)
"""


@pytest.mark.parametrize(("what", "quiet"), [("undo", True), ("keep", False)])
def test_worker_without_its_rank_prints_no_error(what: str, quiet: bool) -> None:
    command = [PYTHON, "-c", textwrap.dedent(OFFER), what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LAUNCH_LIMIT_S, check=True)
    assert ("in _serve" not in done.stderr) is quiet
    assert (done.stderr == "") is quiet


def test_lost_worker_is_reported_only_once() -> None:
    before = signal.signal(signal.SIGCHLD, lambda *_: pytest.fail("reported again"))
    try:
        reported = worker_lost_error(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "))
        os.kill(os.getpid(), signal.SIGCHLD)
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert str(reported).startswith("loader workers: DataLoader worker (pid 7) is killed by signal: Killed; see")


@pytest.mark.parametrize(
    ("text", "printed"), [("DataLoader worker (pid 7) is killed by signal: Killed. ", False), ("another error", True)]
)
def test_worker_death_in_a_destructor_prints_nothing(
    text: str, printed: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closes:
        def __del__(self) -> None:
            raise RuntimeError(text)

    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)  # pytest has one of its own
    with translate_worker_death():
        closing = Closes()
        del closing
    assert ("Traceback" in capsys.readouterr().err) is printed
    assert sys.unraisablehook is sys.__unraisablehook__
