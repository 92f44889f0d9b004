"""A guard for each rank of several nodes: its parent, which sees to it that all ranks end when one has failed.

Launchers do not: mpirun waits for ever for a node that is cut off, hydra for ranks that are stuck when one has failed,
torchrun's agent on one node knows nothing of the other's ranks.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from entrypoint.core.console import error_prefix, log, report_error, report_status, write_stderr
from entrypoint.core.errors import NOT_RETRYABLE, ExitCode, UserError, describe_exit
from entrypoint.core.process import name_process
from entrypoint.core.signals import FORWARDED
from entrypoint.job.launcher_quirks import MPI_PROCESSES
from entrypoint.machine.oom import oom_message, read_memory
from entrypoint.machine.procfs import ROOT, ancestors, read_lines
from entrypoint.supervise.child import POLL_INTERVAL_S, fork_exec, forward_signals
from entrypoint.supervise.failure_channel import NODE_LOST_CODE, FailureChannel, FirstFailure, RankEndpoint

# What `verify` knows guards by.
PROCESS_NAME = "rank-guard"
# When another rank has failed: what this one has to end by itself, then after SIGTERM.
EXIT_WAIT_S, SIGTERM_WAIT_S = 5.0, 5.0
# Between a rank's end and the bond's: others that failed sooner may still be on their way.
FAILURE_SETTLE_S = 1.0
LAUNCHER_KILL_DELAY_S = 5.0


def run_guarded(
    argv: tuple[str, ...], environment: Mapping[str, str], bond: FailureChannel, timeout_s: float, grace_s: float
) -> NoReturn:
    """Run the rank's program as a child to its end, and end as it did; a rank that a signal has ended gives 5.

    Raises `UserError` where ranks have to agree on a port and rank 0 cannot be asked within `timeout_s` seconds.
    """
    name_process(PROCESS_NAME)
    child, gate = spawn_gated(argv, environment)
    place, memory = bond.place, read_memory(ROOT)
    asked = forward_signals(child)
    bond.start()
    if bond.ports:
        environment = {**environment, "MASTER_PORT": str(bond.wait_for_port(timeout_s, log))}
    os.write(gate, environment["MASTER_PORT"].encode())
    os.close(gate)
    status, ended_by_guard = wait_or_terminate(child, bond, place, grace_s)
    code = os.waitstatus_to_exitcode(status)
    how = describe_exit(code, oom_message(memory, read_memory(ROOT)))
    if code:
        time.sleep(FAILURE_SETTLE_S)
    mine = bond.verdict is None
    if code < 0 and -code in asked:  # the launcher's wish
        code = 128 - code
    if bond.verdict and not mine and code - 128 in asked:  # a launcher that has seen the first failure ends the others
        ended_by_guard = code != bond.verdict.code
    bond.ended(code if mine else 0, how)
    if mine and bond.verdict:
        report_own_failure(bond.verdict) if code < 0 else print_failure(bond.verdict, place)
    if code and bond.verdict and bond.verdict.code == NODE_LOST_CODE:
        kill_stuck_launchers()
    if ended_by_guard and bond.verdict and bond.verdict.code in NOT_RETRYABLE:
        code = bond.verdict.code
    elif ended_by_guard or code < 0:
        code = ExitCode.RANK_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn_gated(argv: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, int]:
    """Fork the program, which the kernel asks to end when this guard is gone; return its process id and its gate.

    It starts when it is written there which port ranks meet on. The fork comes before this guard has any threads.
    """
    port, gate = os.pipe()
    child = fork_exec(argv, environment, gate=port)
    os.close(port)
    return child, gate


def wait_or_terminate(child: int, bond: FailureChannel, place: RankEndpoint, grace_s: float) -> tuple[int, bool]:
    """Wait for the child, and end it where another rank has failed; return its status and whether that was needed.

    Where the other one has saved and ended, this one has `grace_s` seconds to do the same.
    """
    ends = []
    with suppress(OSError):  # an old kernel or a container's seccomp filter: then it is looked at every POLL_S
        ends.append(os.pidfd_open(child))
    since, forced = 0.0, False
    while True:
        select.select(ends, [], [], POLL_INTERVAL_S)
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status, forced
        if bond.verdict is None:
            continue
        now = time.monotonic()
        if not since:
            since = now
            print_failure(bond.verdict, place)
        patience = EXIT_WAIT_S if bond.verdict.code != ExitCode.PREEMPTED else grace_s
        if now - since > patience + SIGTERM_WAIT_S:
            os.kill(child, signal.SIGKILL)
        elif now - since > patience and not forced:
            forced = True
            os.kill(child, signal.SIGTERM)


def failure_message(verdict: FirstFailure) -> str:
    """Return the line that names who failed first."""
    return f"rank {verdict.rank} on {verdict.node} failed first: {verdict.how}"


def print_failure(verdict: FirstFailure, place: RankEndpoint) -> None:
    """Say on rank 0 which rank failed first."""
    if place.rank == 0 and verdict.code != ExitCode.PREEMPTED:
        write_stderr(f"{error_prefix(ExitCode.RANK_FAILED)}{failure_message(verdict)}")
        if verdict.code > 0:
            report_status(first_failure=verdict.code)


def report_own_failure(verdict: FirstFailure) -> None:
    """Say that this guard's own rank was ended by a signal: to torchrun's agent where one listens."""
    report_error(UserError(failure_message(verdict), ExitCode.RANK_FAILED))


def kill_stuck_launchers() -> None:
    """End an MPI's launcher on this node that still waits for a node which is lost, after a moment to end by itself.

    Open MPI's mpirun waits for its daemon there for a quarter of an hour (tcp_retries2), hydra's for ever.
    """
    stuck = [int(pid) for pid in ancestors(ROOT) if "".join(read_lines(ROOT / f"proc/{pid}/comm")) in MPI_PROCESSES]
    ends = []
    for pid in stuck:
        with suppress(OSError):
            ends.append(os.pidfd_open(pid))
    if not ends or os.fork():
        return
    os.setsid()
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LAUNCHER_KILL_DELAY_S)
    for end in ends:
        with suppress(OSError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
    os._exit(0)
