"""Waiting for signals: one that comes, none in time, and a process that is suspended meanwhile."""

from __future__ import annotations

import signal
import subprocess
import time

import pytest

from tests.conftest import LAUNCH_LIMIT_S, PYTHON
from tests.processes import killed_at_end, next_line, state, wait_until

PROGRAM = """
import signal, sys
from entrypoint.core.process import wait_for_signal

numbers = [signal.SIGUSR1, signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, [*numbers, signal.SIGALRM])
for timeout_s in map(float, sys.argv[1:]):
    print("waits", flush=True)
    received = wait_for_signal(numbers, timeout_s)
    print(received and signal.Signals(received.si_signo).name, flush=True)
"""


def waiting(*seconds: float) -> list[str]:
    return [PYTHON, "-c", PROGRAM, *map(str, seconds)]


def test_signal_is_returned_and_its_timer_ends_with_it() -> None:
    with killed_at_end(waiting(60, 0.01, 0, 0), stdout=subprocess.PIPE, text=True) as process:
        assert next_line(process) == "waits\n"
        process.send_signal(signal.SIGUSR1)
        seen = process.communicate(timeout=LAUNCH_LIMIT_S)[0].split()
        assert [word for word in seen if word != "waits"] == ["SIGUSR1", "None", "None", "None"]


@pytest.mark.launch
def test_time_that_passes_while_suspended_is_no_signal() -> None:
    with killed_at_end(waiting(0.5, 60), stdout=subprocess.PIPE, text=True) as process:
        assert next_line(process) == "waits\n"
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: state(process.pid) == "T")
        time.sleep(1)
        process.send_signal(signal.SIGCONT)
        assert [next_line(process) for _ in range(2)] == ["None\n", "waits\n"]
        process.terminate()
        assert process.communicate(timeout=LAUNCH_LIMIT_S)[0] == "SIGTERM\n"
