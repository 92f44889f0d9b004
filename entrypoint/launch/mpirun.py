"""mpirun as a child of ours: its signals passed on, its exit code made one of the documented table.

Open MPI's ends with 255 where a node was lost, with 137 where it had to be killed; hydra's with 0 after a SIGTERM,
whatever became of its ranks. What the ranks themselves said last, through it, tells better.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from entrypoint.core.console import error_prefix
from entrypoint.core.errors import ExitCode
from entrypoint.core.signals import DUPLICATE_WINDOW_S, TERMINATING
from entrypoint.supervise.child import POLL_INTERVAL_S, fork_exec, forward_signals

PREEMPTED = error_prefix(ExitCode.PREEMPTED).encode()
# What rank 0's guard says of a rank that ended by itself.
OWN_CODE = re.compile(rb"rank \d+ on \S+ failed first: exit code (\d+)")


class StderrScanner:
    """What was said on standard error, as far as it tells how the job ended."""

    def __init__(self) -> None:
        self.rest = b""
        self.preempted = False
        self.own_code: int | None = None

    def hear(self, data: bytes) -> None:
        """Take more of it, in pieces of any size."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.preempted |= PREEMPTED in line
            match = OWN_CODE.search(line)
            if match:
                self.own_code = int(match[1])


class StopTranslator:
    """The first signal that would end mpirun becomes one that it passes on to ranks which save then, and end.

    For its own part it gives them two seconds, and drops what they say. `since` is when that was.
    """

    def __init__(self) -> None:
        self.since = 0.0

    def __call__(self, number: int) -> int:
        """Return what mpirun is told in place of a signal; what follows within a second is the same one."""
        now = time.monotonic()
        if number not in TERMINATING or (self.since and now - self.since > DUPLICATE_WINDOW_S):
            return number
        self.since = self.since or now
        return signal.SIGUSR1

    def is_over(self, grace_s: float) -> bool:
        """Tell whether the ranks have had their time."""
        return bool(self.since) and time.monotonic() - self.since > grace_s


def supervise_mpirun(
    argv: tuple[str, ...], environment: Mapping[str, str], *, saves: bool = False, grace_s: float = 0.0
) -> int:
    """Run mpirun to its end and return the job's exit code; what it says on standard error goes through here.

    Ranks that save when they are warned have `grace_s` seconds for that, before mpirun is told to end them.
    """
    said, into = os.pipe()
    child = fork_exec(argv, environment, stderr=into, apart=saves)
    os.close(into)
    asking = StopTranslator()
    asked = forward_signals(child, asking if saves else None)
    words, data = StderrScanner(), b" "
    while True:
        # What mpirun leaves behind when it is killed (its ssh) may hold this open: its own end counts.
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and asking.is_over(grace_s):
            os.kill(child, signal.SIGTERM)
            grace_s = math.inf
        while select.select([said], [], [], 0 if ended else POLL_INTERVAL_S)[0] and (data := os.read(said, 65536)):
            words.hear(data)
            write_all(2, data)
        if ended:
            return job_exit_code(os.waitstatus_to_exitcode(status), asked, words)
        if not data:
            time.sleep(POLL_INTERVAL_S)


def write_all(file: int, data: bytes) -> None:
    """Write all of it; who reads may have gone."""
    with suppress(OSError):
        while data:
            data = data[os.write(file, data) :]


def job_exit_code(code: int, asked: list[int], words: StderrScanner) -> int:
    """Return the job's code of mpirun's (negative: the signal that ended it) and of what was said and `asked`."""
    ends = [number for number in asked if number in TERMINATING]
    if words.preempted:
        return ExitCode.PREEMPTED
    if words.own_code is not None:
        return words.own_code
    if ends and (code <= 0 or code >= 128):
        return 128 + ends[0]
    if code < 0 or code > 128:
        return ExitCode.RANK_FAILED
    return code
