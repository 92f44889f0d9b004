"""Runs mpirun as a child: forwards signals, and returns an exit code of the documented table.

Open MPI's mpirun ends with 255 for a lost node and 137 if it had to be killed; hydra's ends with 0 after SIGTERM,
whatever happened to its ranks. Ranks therefore print status records, which come through mpirun from every node.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import time
from collections.abc import Mapping
from contextlib import suppress

from entrypoint.core.console import STATUS_PREFIX, STATUS_VAR, write_all
from entrypoint.core.errors import ExitCode
from entrypoint.core.process import DUPLICATE_WINDOW_S, TERMINATING
from entrypoint.supervise.child import POLL_INTERVAL_S, fork_exec, forward_signals, log_late

PREFIX = STATUS_PREFIX.encode()


class StderrScanner:
    """Takes the ranks' status records out of mpirun's standard error; the rest passes through."""

    def __init__(self) -> None:
        self.pending = b""
        self.preempted = False
        self.first_failure: int | None = None

    def feed(self, data: bytes) -> bytes:
        """Take pieces of any size; return what is to be shown."""
        *lines, rest = (self.pending + data).split(b"\n")
        shown = b"".join(line + b"\n" for line in lines if not self.take_record(line))
        ends = (rest[start:] for start in range(len(rest)))
        self.pending = next((end for end in ends if end.startswith(PREFIX) or PREFIX.startswith(end)), b"")
        return shown + rest.removesuffix(self.pending)

    def take_record(self, line: bytes) -> bool:
        """Return whether a line is a status record, and note what it says."""
        _, prefix, text = line.partition(PREFIX)
        if not prefix:
            return False
        with suppress(ValueError, AttributeError):
            record = json.loads(text)
            self.preempted |= bool(record.get("preempted"))
            self.first_failure = record.get("first_failure", self.first_failure)
            return True
        return False


class StopTranslator:
    """Translates the first terminating signal into SIGUSR1, which mpirun forwards to ranks that then save and end.

    A terminating signal would have mpirun kill the ranks within two seconds. `since` is the time of the first signal.
    """

    def __init__(self) -> None:
        self.since = 0.0

    def __call__(self, number: int) -> int:
        """Return the signal for mpirun; another one within a second counts as the same request."""
        now = time.monotonic()
        if number not in TERMINATING or (self.since and now - self.since > DUPLICATE_WINDOW_S):
            return number
        self.since = self.since or now
        return signal.SIGUSR1


def supervise_mpirun(
    argv: tuple[str, ...], environment: Mapping[str, str], *, saves: bool = False, grace_s: float = 0.0
) -> int:
    """Run mpirun to its end and return the job's exit code; its standard error passes through here.

    Ranks that write checkpoints have `grace_s` seconds for that after a stop request, then mpirun is terminated.
    """
    said, into = os.pipe()
    child = fork_exec(argv, {**environment, STATUS_VAR: "1"}, stderr=into, own_process_group=saves)
    os.close(into)
    asking = StopTranslator()
    asked = forward_signals(child, asking if saves else None)
    scanner, data = StderrScanner(), b" "
    while True:
        # A killed mpirun may leave an ssh that holds this open, so mpirun's own end counts.
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended and asking.since and time.monotonic() - asking.since > grace_s:
            log_late("mpirun", grace_s, "was terminated")
            os.kill(child, signal.SIGTERM)
            grace_s = math.inf
        while select.select([said], [], [], 0 if ended else POLL_INTERVAL_S)[0] and (data := os.read(said, 65536)):
            with suppress(OSError):  # nobody reads it any more
                write_all(2, scanner.feed(data))
        if ended:
            with suppress(OSError):
                write_all(2, scanner.pending)
            return job_exit_code(os.waitstatus_to_exitcode(status), asked, scanner)
        if not data:
            time.sleep(POLL_INTERVAL_S)


def job_exit_code(code: int, asked: list[int], scanner: StderrScanner) -> int:
    """Return the job's exit code from mpirun's (negative: a signal), the signals in `asked`, and the status records."""
    ends = [number for number in asked if number in TERMINATING]
    if scanner.preempted:
        return ExitCode.PREEMPTED
    if scanner.first_failure is not None:
        return scanner.first_failure
    if ends and (code <= 0 or code >= 128):
        return 128 + ends[0]
    if code < 0 or code > 128:
        return ExitCode.RANK_FAILED
    return code
