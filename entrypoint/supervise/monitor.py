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
from collections.abc import Iterator, Mapping
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
    write_error_file,
    write_once,
    write_stderr,
)
from entrypoint.core.errors import COLLECTIVE_KEY, HANG_SETTLE_S, ExitCode, UserError, describe_exit, one_line
from entrypoint.core.process import FORWARDED, PREEMPTION, TERMINATING, name_process
from entrypoint.job.launcher_quirks import MPI_PROCESSES
from entrypoint.machine.cgroup import oom_message, read_memory
from entrypoint.machine.procfs import ROOT, ancestors, read_lines, state_of, state_text
from entrypoint.supervise.admission import (
    FirstFailure,
    RankEndpoint,
    code_after,
    failure_message,
    final_exit_code,
    with_signal_code,
)
from entrypoint.supervise.channel_server import NODE_LOST_CODE
from entrypoint.supervise.child import POLL_INTERVAL_S, forward_signals, has_exited, log_late
from entrypoint.supervise.failure_channel import FailureChannel
from entrypoint.supervise.gate import open_gate, spawn_gated

# `verify` finds monitors by this name.
PROCESS_NAME = "ep-monitor"
# In each rank of MPICH's and Intel's hydra, which kills all others as soon as one has failed, rank 0 as well.
HYDRA_VAR = "MPI_LOCALRANKID"
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
    Raises `UserError` if the ranks' port comes from the job's id and rank 0 does not answer within `timeout_s` seconds,
    or if the job is over before this rank starts.
    """
    name_process(PROCESS_NAME)
    started = time.monotonic()
    environment = with_error_record(environment)
    gate = spawn_gated(argv, environment, PREEMPTION if handles_preemption else ())
    memory, received = read_memory(ROOT), forward_signals(gate.child)
    channel.start()
    open_gate(gate, channel, received, timeout_s)
    # The trainer waits for the other ranks itself.
    limit_s = None if handles_preemption else timeout_s
    code, forced, is_told = wait_or_terminate(gate.child, channel, environment, grace_s, limit_s)
    if code:
        time.sleep(FAILURE_SETTLE_S)
    other = channel.first_failure
    if code and not other:
        oom = oom_message(memory, read_memory(ROOT))
        report_first(channel, code, received, oom, environment)
    elif other and not is_told:
        print_failure(other, channel.endpoint, environment)
    final = final_exit_code(code, received, other, forced=forced)
    if final:
        tell_others(channel, with_signal_code(code, received), received)
    else:
        limit_s = timeout_s if channel.waits_for_rank0 else LATE_RANK_WAIT_S + started - time.monotonic()
        final = code_of_success(channel, received, limit_s, environment)
    channel.report_exit(0, "")
    leave(channel, final, stays=not forced and with_signal_code(code, received) - 128 not in received)


def report_first(
    channel: FailureChannel, code: int, received: list[int], oom: str, environment: Mapping[str, str]
) -> None:
    """Report that this monitor's own rank is the first that failed, and print it; `oom` is what memory says."""
    rank, node = channel.endpoint.rank, channel.endpoint.node
    lost_collective, how_lost = read_lost_collective(environment)
    how = describe_exit(code, oom) + how_lost
    code = with_signal_code(code, received)
    failure = FirstFailure(rank, node, code, how, lost_collective=lost_collective)
    channel.report_failure(failure)
    if code < 0:  # to torchrun's agent, if there is one
        report_error(UserError(failure_message(failure), ExitCode.RANK_FAILED))
    else:
        print_failure(failure, channel.endpoint, environment)


def tell_others(channel: FailureChannel, code: int, received: list[int]) -> None:
    """Stay until the other ranks know how this one failed."""
    if code - 128 in received or code == ExitCode.RENDEZVOUS:
        return  # what stopped this rank stops the others too, or it has waited for them long enough
    before_start = channel.first_failure and channel.first_failure.before_start
    soon = channel.endpoint.rank or before_start or channel.access.own_user_only
    limit_s = EARLY_FAILURE_WAIT_S if soon else LATE_RANK_WAIT_S
    channel.wait_for_others(limit_s, lambda: bool(stops_in(received)), log)


def code_of_success(
    channel: FailureChannel, received: list[int], limit_s: float, environment: Mapping[str, str]
) -> int:
    """Stay until the other ranks know that this one has succeeded, and return the exit code.

    It becomes a failure if another rank fails later, or does not start within `limit_s` seconds.
    """
    earlier = len(received)
    all_know = channel.wait_for_others(limit_s, lambda: bool(stops_in(received)), log)
    if stops := stops_in(received[earlier:]):
        return 128 + stops[0]
    if not all_know and channel.waits_for_rank0 and not stops_in(received):
        how = (
            f"not all ranks started within {limit_s:.0f} s. Check their output, or increase"
            " LAUNCH_RENDEZVOUS_TIMEOUT_S."
        )
        endpoint = channel.endpoint
        channel.report_failure(FirstFailure(endpoint.rank, endpoint.node, ExitCode.RENDEZVOUS, how, before_start=True))
    if channel.endpoint.rank or not channel.first_failure:
        if all_know and channel.listens and channel.store and channel.rank0.others:
            channel.door.warn_if_unused()
        return ExitCode.DONE
    time.sleep(FAILURE_SETTLE_S)  # the failed rank's own code is to reach the launcher first
    print_failure(channel.first_failure, channel.endpoint, environment)
    return code_after(channel.first_failure)


def stops_in(received: list[int]) -> list[int]:
    """Return the signals that stop the job."""
    return [number for number in received if number in TERMINATING]


def leave(channel: FailureChannel, code: int, *, stays: bool) -> NoReturn:
    """Exit with this code; a rank that waited in vain `stays` until the missing one has printed where it is."""
    failure = channel.first_failure
    if code and failure and failure.code == NODE_LOST_CODE:
        kill_stuck_launchers()
    if code and failure and failure.lost_collective and stays:
        time.sleep(EXPLAIN_WAIT_S)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def wait_or_terminate(
    child: int, channel: FailureChannel, environment: Mapping[str, str], grace_s: float, limit_s: float | None
) -> tuple[int, bool, bool]:
    """Wait for the child, and terminate it if another rank fails, or does not come within `limit_s` seconds.

    Return its code, whether it was terminated, and whether that failure was printed.
    """
    began, pidfds = time.monotonic(), []
    with suppress(OSError):  # on an old kernel or under a seccomp filter: poll every POLL_INTERVAL_S
        pidfds.append(os.pidfd_open(child))
    termination: Iterator[bool] | None = None
    forced = False
    while True:
        select.select(pidfds, [], [], POLL_INTERVAL_S)
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status), forced, termination is not None
        if limit_s is not None and not channel.first_failure:
            channel.report_absent(time.monotonic() - began, limit_s)
        if channel.first_failure and not termination:
            print_failure_elsewhere(child, channel.endpoint, channel.first_failure, environment)
            termination = terminate(child, channel.endpoint, channel.first_failure, grace_s)
        if termination:
            forced = next(termination)


def print_failure_elsewhere(
    child: int, endpoint: RankEndpoint, failure: FirstFailure, environment: Mapping[str, str]
) -> None:
    """Print another rank's failure, and whether the others may have waited for this rank."""
    if state_of(child) == "T" and not failure.lost_collective:
        stopped = f"process {child} is {state_text(child)}"
        log(f"rank {endpoint.rank}: {stopped}. The others may have waited for it.")
    print_failure(failure, endpoint, environment)


def terminate(child: int, endpoint: RankEndpoint, failure: FirstFailure, grace_s: float) -> Iterator[bool]:
    """End this rank's program after another rank's failure: it may exit, then gets SIGTERM, then SIGKILL.

    If the other rank was preempted and saved, this one has `grace_s` seconds to save too. Yields whether the program
    was asked to end, as often as the caller looks.
    """
    began = time.monotonic()
    saves = failure.code == ExitCode.PREEMPTED
    if failure.lost_collective:
        while time.monotonic() < began + HANG_SETTLE_S:
            yield False
        report_missing(child, endpoint, failure)
    # Before the start no rank has trained, and nothing is to be saved.
    terminate_at = began + (0 if failure.before_start else grace_s if saves else EXIT_WAIT_S)
    while time.monotonic() <= terminate_at:
        yield False
    os.kill(child, signal.SIGTERM)
    while time.monotonic() <= terminate_at + SIGTERM_WAIT_S:
        yield True
    if saves:
        log_late(f"rank {endpoint.rank} (process {child})", grace_s)
    os.kill(child, signal.SIGKILL)
    while True:
        yield True


def report_missing(child: int, endpoint: RankEndpoint, failure: FirstFailure) -> None:
    """Print where this rank is, if it is the one that was missing from a collective; print its stacks too."""
    from entrypoint.hang.stacks import locate, stacks_text  # late: a start does not need it

    located = locate(child)
    if located.collective or located.is_exiting or has_exited(child):
        return
    lost = f"{one_line(failure.lost_collective)}, where rank {failure.rank} waited in vain"
    log(f"rank {endpoint.rank} is missing from {lost}: process {child} on {endpoint.node} {located.text}")
    if located.stacks:
        write_stderr(stacks_text(f"rank {endpoint.rank}  process {child}", located.stacks))


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
    collective = extra.get(COLLECTIVE_KEY) or {}
    where = f"{collective['called']} at {collective['place']}" if "place" in collective else ""
    message = str(record.get("message"))
    return where or "a collective", f" ({one_line(f'{where}: {message}' if where else message)})"


def print_failure(failure: FirstFailure, endpoint: RankEndpoint, environment: Mapping[str, str]) -> None:
    """Print on rank 0, on rank 1 if rank 0 is lost, which rank failed first; under hydra that rank itself.

    Each node's agent says it in its last line, and why a run could not start.
    """
    rank, message = endpoint.rank, failure_message(failure)
    agent = environment.get("TORCHELASTIC_ERROR_FILE", "")  # of which it shows one of the messages
    printing_rank = failure.rank if HYDRA_VAR in environment else 0
    if failure.code == NODE_LOST_CODE:
        printing_rank = 1 if failure.rank == 0 else 0
    if failure.before_start and (agent or environment.get("LOCAL_RANK") == "0"):
        report_error(UserError(message, code_after(failure)))
    elif failure.code == ExitCode.PREEMPTED:
        return
    elif agent and not failure.lost_collective and failure.code != NODE_LOST_CODE:
        if failure.node != endpoint.node:
            write_error_file(agent, UserError(message, code_after(failure)))
    elif rank == printing_rank:
        write_once(f"{error_prefix(ExitCode.RANK_FAILED)}{message}")
    if rank == 0 and failure.code > 0:
        report_status(first_failure=failure.code)


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
