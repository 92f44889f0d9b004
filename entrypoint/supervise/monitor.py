"""Parent process of each rank that a launcher starts; stops all ranks when one of them fails.

Launchers do not do this. mpirun waits forever for a node that is cut off. Hydra waits forever for stuck ranks after
another rank fails, and so does srun. torchrun's agent does not know the ranks of other nodes.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from entrypoint.core.console import (
    RECORD_VAR,
    error_prefix,
    error_record_path,
    log,
    read_error_record,
    report_error,
    report_status,
    write_stderr,
)
from entrypoint.core.errors import COLLECTIVE_KEY, HANG_SETTLE_S, ExitCode, UserError, describe_exit, one_line
from entrypoint.core.process import name_process
from entrypoint.core.signals import FORWARDED, PREEMPTION, TERMINATING
from entrypoint.job.launcher_quirks import MPI_PROCESSES
from entrypoint.machine.oom import oom_message, read_memory
from entrypoint.machine.procfs import ROOT, ancestors, read_lines, state_of, state_text
from entrypoint.supervise.admission import FirstFailure, RankEndpoint
from entrypoint.supervise.child import POLL_INTERVAL_S, forward_signals, log_late
from entrypoint.supervise.failure_channel import NODE_LOST_CODE, FailureChannel
from entrypoint.supervise.gate import Gate, code_after, failure_message, has_exited, open_gate, spawn_gated

# `verify` finds monitors by this name.
PROCESS_NAME = "ep-monitor"
# After another rank fails: the time this rank has to exit, first without and then after SIGTERM.
EXIT_WAIT_S, SIGTERM_WAIT_S = 5.0, 5.0
# Delay between a rank's exit and its report: an earlier failure may still arrive.
FAILURE_SETTLE_S = 1.0
LAUNCHER_KILL_DELAY_S = 5.0
# How long a rank that waited in vain stays: Open MPI ends the missing one, which prints where it is, with the first.
EXPLAIN_WAIT_S = HANG_SETTLE_S + 2

# How long a rank that has failed waits for ranks that have not connected yet, to tell them: rank 0, and another one.
LATE_RANK_WAIT_S, EARLY_FAILURE_WAIT_S = 60.0, 10.0


def run_guarded(
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    channel: FailureChannel,
    timeout_s: float,
    grace_s: float,
    *,
    handles_preemption: bool = False,
) -> NoReturn:
    """Run the rank's program as a child, and exit with its exit code, or with 5 if a signal killed it.

    With `handles_preemption` the program installs handlers for the signals of `PREEMPTION`, which wait until then.
    Raises `UserError` if the ranks need a common port and rank 0 does not send it within `timeout_s` seconds, or if
    the job is over before this rank starts.
    """
    name_process(PROCESS_NAME)
    start, deferred = time.monotonic(), PREEMPTION if handles_preemption else ()
    environment = with_error_record(environment)
    child, port_pipe = spawn_gated(argv, environment, deferred)
    memory, received = read_memory(ROOT), forward_signals(child)
    channel.start()
    open_gate(Gate(child, port_pipe, deferred), int(environment["MASTER_PORT"]), channel, received, timeout_s)
    status, ended_by_monitor = wait_or_terminate(child, channel, environment, grace_s)
    code = os.waitstatus_to_exitcode(status)
    lost_collective, how_lost = read_lost_collective(environment)
    how = describe_exit(code, oom_message(memory, read_memory(ROOT))) + how_lost
    if code:
        time.sleep(FAILURE_SETTLE_S)
    is_first = channel.first_failure is None
    if code < 0 and -code in received:  # the launcher sent this signal
        code = 128 - code
    if (
        channel.first_failure and not is_first and code - 128 in received
    ):  # the launcher ends all ranks after the first failure
        ended_by_monitor = code != channel.first_failure.code
    if code and is_first:
        rank, node = channel.endpoint.rank, channel.endpoint.node
        channel.report_failure(FirstFailure(rank, node, code, how, lost_collective=lost_collective))
    if is_first and channel.first_failure:
        report_own_failure(channel.first_failure) if code < 0 else print_failure(
            channel.first_failure, channel.endpoint.rank, environment
        )
    limit_s = timeout_s if channel.ports else LATE_RANK_WAIT_S + start - time.monotonic()
    code = wait_for_job(channel, code, received, limit_s, environment)
    channel.report_exit(0, how)
    if code and channel.first_failure and channel.first_failure.code == NODE_LOST_CODE:
        kill_stuck_launchers()
    if ended_by_monitor and channel.first_failure:
        code = code_after(channel.first_failure)
    elif code < 0:
        code = ExitCode.RANK_FAILED
    if code and not ended_by_monitor and channel.first_failure and channel.first_failure.lost_collective:
        time.sleep(EXPLAIN_WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_for_job(
    channel: FailureChannel, code: int, received: list[int], limit_s: float, environment: Mapping[str, str]
) -> int:
    """Stay until the other ranks know how this one ended, and return the exit code.

    A success becomes a failure if another rank fails later, or does not start within `limit_s` seconds.
    """
    earlier = len(received)

    def is_stopped() -> bool:
        return not set(TERMINATING).isdisjoint(received)

    if code - 128 in received or code == ExitCode.RENDEZVOUS:
        return code  # what stopped this rank stops the others too, or it has waited for them long enough
    if code:
        before_start = channel.first_failure and channel.first_failure.before_start
        soon = channel.endpoint.rank or before_start or channel.access.own_user_only
        limit_s = EARLY_FAILURE_WAIT_S if soon else LATE_RANK_WAIT_S
    all_know = channel.wait_for_others(limit_s, is_stopped, log)
    if code:
        return code
    if stops := [number for number in received[earlier:] if number in TERMINATING]:
        return 128 + stops[0]
    if not all_know and channel.ports and not is_stopped():
        how = f"not all ranks started within {limit_s:.0f} s. Check their output, or increase"
        how = f"{how} LAUNCH_RENDEZVOUS_TIMEOUT_S."
        endpoint = channel.endpoint
        channel.report_failure(FirstFailure(endpoint.rank, endpoint.node, ExitCode.RENDEZVOUS, how, before_start=True))
    if channel.endpoint.rank or not channel.first_failure:
        return 0
    time.sleep(FAILURE_SETTLE_S)  # the failed rank's own code is to reach the launcher first
    print_failure(channel.first_failure, channel.endpoint.rank, environment)
    return code_after(channel.first_failure)


def wait_or_terminate(
    child: int, channel: FailureChannel, environment: Mapping[str, str], grace_s: float
) -> tuple[int, bool]:
    """Wait for the child, and terminate it if another rank fails; return its status and whether it was terminated.

    If the other rank was preempted and saved, this one has `grace_s` seconds to save too.
    """
    pidfds = []
    with suppress(OSError):  # on an old kernel or under a seccomp filter: poll every POLL_INTERVAL_S
        pidfds.append(os.pidfd_open(child))
    failed_at, explain_at, forced, killed = 0.0, 0.0, False, False
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
            explain_at = now + HANG_SETTLE_S if channel.first_failure.lost_collective else 0
            if state_of(child) == "T" and not explain_at:
                rank = channel.endpoint.rank
                log(f"rank {rank}: process {child} is {state_text(child)}. The others may have waited for it.")
            print_failure(channel.first_failure, channel.endpoint.rank, environment)
        if explain_at and now >= explain_at:
            explain_at = 0
            report_missing(child, channel.endpoint, channel.first_failure)
        exit_wait_s = EXIT_WAIT_S if channel.first_failure.code != ExitCode.PREEMPTED else grace_s
        if channel.first_failure.before_start:  # no rank has trained, and nothing is to be saved
            exit_wait_s = 0
        if now - failed_at > exit_wait_s + SIGTERM_WAIT_S:
            if channel.first_failure.code == ExitCode.PREEMPTED and not killed:
                log_late(f"rank {channel.endpoint.rank} (process {child})", grace_s)
            killed = True
            os.kill(child, signal.SIGKILL)
        elif now - failed_at > exit_wait_s and not forced:
            forced = True
            os.kill(child, signal.SIGTERM)


def report_missing(child: int, endpoint: RankEndpoint, failure: FirstFailure) -> None:
    """Print where this rank is, if it is the one that was missing from a collective; print its stacks too."""
    from entrypoint.machine.missing_ranks import locate  # late: a start does not need it
    from entrypoint.machine.stacks import stacks_text

    found = locate(child)
    if found.collective or found.is_exiting or has_exited(child):
        return
    lost = f"{one_line(failure.lost_collective)}, where rank {failure.rank} waited in vain"
    log(f"rank {endpoint.rank} is missing from {lost}: process {child} on {endpoint.node} {found.text}")
    if found.stacks:
        write_stderr(stacks_text(f"rank {endpoint.rank}  process {child}", found.stacks))


def with_error_record(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Return the program's environment with a file in memory for what it says about its end, if torchrun has none."""
    if "TORCHELASTIC_ERROR_FILE" in environment:
        return environment
    with suppress(OSError):
        return {**environment, RECORD_VAR: f"/proc/{os.getpid()}/fd/{os.memfd_create('entrypoint-error')}"}
    return environment


def read_lost_collective(environment: Mapping[str, str]) -> tuple[str, str]:
    """Return the collective in which a rank waited for others in vain, and what it wrote about that.

    Both are empty for any other end.
    """
    record = read_error_record(Path(error_record_path(environment) or os.devnull))
    extra = record.get("extraInfo")
    if not isinstance(extra, dict) or not extra.get("lost_peer"):
        return "", ""
    found = extra.get(COLLECTIVE_KEY) or {}
    where = f"{found.get('called')} at {found.get('place')}" if found else ""
    said = str(record.get("message"))
    return where or "an exchange", f" ({one_line(f'{where}: {said}' if where else said)})"


def print_failure(failure: FirstFailure, rank: int, environment: Mapping[str, str]) -> None:
    """Print on rank 0, on rank 1 if rank 0 is lost, which rank failed first.

    Why a run could not start is printed on each node.
    """
    agent = "TORCHELASTIC_ERROR_FILE" in environment  # it shows one of the messages
    if failure.before_start and (agent or environment.get("LOCAL_RANK") == "0"):
        report_error(UserError(failure_message(failure), code_after(failure)))
    elif rank == (failure.rank == 0 and failure.code == NODE_LOST_CODE) and failure.code != ExitCode.PREEMPTED:
        write_stderr(f"{error_prefix(ExitCode.RANK_FAILED)}{failure_message(failure)}")
    if rank == 0 and failure.code > 0 and failure.code != ExitCode.PREEMPTED:
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
