"""Parent process of each rank in a multi-node job; stops all ranks when one of them fails.

Launchers do not do this. mpirun waits forever for a node that is cut off. Hydra waits forever for stuck ranks after
another rank fails. torchrun's agent does not know the ranks of other nodes.
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

# `verify` finds monitors by this name.
PROCESS_NAME = "ep-monitor"
# After another rank fails: the time this rank has to exit, first without and then after SIGTERM.
EXIT_WAIT_S, SIGTERM_WAIT_S = 5.0, 5.0
# Delay between a rank's exit and its report: an earlier failure may still arrive.
FAILURE_SETTLE_S = 1.0
LAUNCHER_KILL_DELAY_S = 5.0


def run_guarded(
    argv: tuple[str, ...], environment: Mapping[str, str], channel: FailureChannel, timeout_s: float, grace_s: float
) -> NoReturn:
    """Run the rank's program as a child, and exit with its exit code, or with 5 if a signal killed it.

    Raises `UserError` if the ranks need a common port and rank 0 does not send it within `timeout_s` seconds.
    """
    name_process(PROCESS_NAME)
    child, port_pipe = spawn_gated(argv, environment)
    endpoint, memory = channel.endpoint, read_memory(ROOT)
    received = forward_signals(child)
    channel.start()
    if channel.ports:
        environment = {**environment, "MASTER_PORT": str(channel.wait_for_port(timeout_s, log))}
    os.write(port_pipe, environment["MASTER_PORT"].encode())
    os.close(port_pipe)
    status, ended_by_monitor = wait_or_terminate(child, channel, endpoint, grace_s)
    code = os.waitstatus_to_exitcode(status)
    how = describe_exit(code, oom_message(memory, read_memory(ROOT)))
    if code:
        time.sleep(FAILURE_SETTLE_S)
    is_first = channel.first_failure is None
    if code < 0 and -code in received:  # the launcher sent this signal
        code = 128 - code
    if (
        channel.first_failure and not is_first and code - 128 in received
    ):  # the launcher ends all ranks after the first failure
        ended_by_monitor = code != channel.first_failure.code
    channel.report_exit(code if is_first else 0, how)
    if is_first and channel.first_failure:
        report_own_failure(channel.first_failure) if code < 0 else print_failure(channel.first_failure, endpoint)
    if code and channel.first_failure and channel.first_failure.code == NODE_LOST_CODE:
        kill_stuck_launchers()
    if ended_by_monitor and channel.first_failure and channel.first_failure.code in NOT_RETRYABLE:
        code = channel.first_failure.code
    elif ended_by_monitor or code < 0:
        code = ExitCode.RANK_FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def spawn_gated(argv: tuple[str, ...], environment: Mapping[str, str]) -> tuple[int, int]:
    """Fork the program, and return its process id and the pipe that it waits on for its port.

    The program starts when the rendezvous port is written to that pipe. This monitor forks before it starts threads.
    """
    read_end, port_pipe = os.pipe()
    child = fork_exec(argv, environment, port_pipe=read_end)
    os.close(read_end)
    return child, port_pipe


def wait_or_terminate(child: int, channel: FailureChannel, endpoint: RankEndpoint, grace_s: float) -> tuple[int, bool]:
    """Wait for the child, and terminate it if another rank fails; return its status and whether it was terminated.

    If the other rank was preempted and saved, this one has `grace_s` seconds to save too.
    """
    pidfds = []
    with suppress(OSError):  # on an old kernel or under a seccomp filter: poll every POLL_INTERVAL_S
        pidfds.append(os.pidfd_open(child))
    failed_at, forced = 0.0, False
    while True:
        select.select(pidfds, [], [], POLL_INTERVAL_S)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status, forced
        if channel.first_failure is None:
            continue
        now = time.monotonic()
        if not failed_at:
            failed_at = now
            print_failure(channel.first_failure, endpoint)
        exit_wait_s = EXIT_WAIT_S if channel.first_failure.code != ExitCode.PREEMPTED else grace_s
        if now - failed_at > exit_wait_s + SIGTERM_WAIT_S:
            os.kill(child, signal.SIGKILL)
        elif now - failed_at > exit_wait_s and not forced:
            forced = True
            os.kill(child, signal.SIGTERM)


def failure_message(failure: FirstFailure) -> str:
    """Return the line that names the rank that failed first."""
    return f"rank {failure.rank} on {failure.node} failed first: {failure.how}"


def print_failure(failure: FirstFailure, endpoint: RankEndpoint) -> None:
    """Print on rank 0 which rank failed first."""
    if endpoint.rank == 0 and failure.code != ExitCode.PREEMPTED:
        write_stderr(f"{error_prefix(ExitCode.RANK_FAILED)}{failure_message(failure)}")
        if failure.code > 0:
            report_status(first_failure=failure.code)


def report_own_failure(failure: FirstFailure) -> None:
    """Report that a signal killed this monitor's own rank, to torchrun's agent if there is one."""
    report_error(UserError(failure_message(failure), ExitCode.RANK_FAILED))


def kill_stuck_launchers() -> None:
    """Kill MPI launchers on this node that still wait for a lost node, after a delay in which they may exit.

    Open MPI's mpirun waits 15 minutes for its daemon there (tcp_retries2), hydra's waits forever.
    """
    stuck = [int(pid) for pid in ancestors(ROOT) if "".join(read_lines(ROOT / f"proc/{pid}/comm")) in MPI_PROCESSES]
    pidfds = []
    for pid in stuck:
        with suppress(OSError):
            pidfds.append(os.pidfd_open(pid))
    if not pidfds or os.fork():
        return
    os.setsid()
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    time.sleep(LAUNCHER_KILL_DELAY_S)
    for pidfd in pidfds:
        with suppress(OSError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os._exit(0)
