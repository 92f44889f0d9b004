"""Starts this node's ranks as children of the entrypoint, monitors them and stops all when one fails.

torchrun's agent does the same, but imports torch first. The entrypoint uses it only for restarts over several nodes.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from entrypoint.core.console import log, read_error_record, report_error, write_stderr
from entrypoint.core.errors import HANG_SETTLE_S, NOT_RETRYABLE, ExitCode, UserError
from entrypoint.core.process import (
    FORWARDED,
    PREEMPTION,
    TERMINATING,
    die_with_parent,
    end_groups,
    from_terminal,
    name_process,
    not_ignored,
    signal_groups,
    wait_for_signal,
)
from entrypoint.job.detect import Job
from entrypoint.launch.failures import (
    ERROR_FILE,
    Failure,
    explain_hang,
    first_failed,
    first_failure,
    print_final_message,
    repeat_warning,
    report_stop,
)
from entrypoint.launch.meeting import open_rendezvous
from entrypoint.machine.cgroup import oom_message, read_memory
from entrypoint.machine.procfs import ROOT
from entrypoint.plan.model import OutputPlan, Plan
from entrypoint.rank.bootstrap import exec_program
from entrypoint.rank.environment import torchelastic_variables
from entrypoint.supervise.child import log_late

if TYPE_CHECKING:
    from entrypoint.launch.rank_output import RankOutput

# The name in the process list.
PROCESS_NAME = "ep-agent"
# The terminal signals only the parent, which forwards the signals of all keys, not only Ctrl-C.
JOB_ENDING = (*TERMINATING, signal.SIGQUIT)
HANDLED = (*FORWARDED, signal.SIGQUIT, signal.SIGTSTP)
# Delay between the end of the grace period's first signal and SIGKILL.
KILL_DELAY_S = 5.0
# SIGCHLD reports each exit. Polling is a fallback.
POLL_INTERVAL_S = 1.0


def run(plan: Plan, job: Job, environ: Mapping[str, str]) -> int:
    """Start this node's ranks with `environ`, and return the job's exit code when all have exited.

    Raises `UserError` if the MASTER_PORT that the user set is taken.
    """
    name_process(PROCESS_NAME)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if the caller ignored SIGCHLD, no exit would be reported
    restart = 0
    while (code := run_once(plan, job, environ, restart)) is None:
        restart += 1
    return code


def run_once(plan: Plan, job: Job, environ: Mapping[str, str], restart: int) -> int | None:
    """Start the ranks, and return the job's exit code when all have exited; None if they are to restart."""
    memory = read_memory(ROOT)
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder, open_rendezvous(plan, environ) as meeting:
        ranks = LocalRanks(plan, Path(folder), open_output(plan, restart), restart)
        signal.pthread_sigmask(signal.SIG_BLOCK, ranks.blocked_signals)
        for local_rank in range(plan.nodes.nproc_per_node):
            ranks.start_rank(local_rank, job, {**environ, **meeting.variables})
        meeting.serve()
        ranks.monitor_with_output()
        message, code = "", 0
        if ranks.failures:
            message, code = first_failure(ranks.failures, oom_message(memory, read_memory(ROOT)))
            message = ranks.hang or message
        if restart < plan.nodes.max_restarts and ranks.can_restart():
            log(f"restart {restart + 1} of {plan.nodes.max_restarts}: {message}")
            return None
        repeat_warning(plan)
        if not ranks.failures:
            if meeting.door:
                meeting.door.warn_if_unused()
            return ExitCode.DONE
        if ranks.stop_signal:
            codes = [failure.exitcode for failure in ranks.failures]
            return report_stop(Path(folder), ranks.stop_signal, codes)
        first = first_failed(ranks.failures)
        if plan.launcher == "direct" and first.exitcode > 0 and not first.error_file:
            return code  # a single program has printed its own error; one that a signal killed has not
        if ranks.output:
            ranks.output.print_tail(first.rank)
        return print_final_message(message, code)


def open_output(plan: Plan, restart: int) -> RankOutput | None:
    """Return the relay of the ranks' output; a single rank has the terminal to itself unless it is asked for."""
    if plan.nodes.nproc_per_node == 1 and plan.output == OutputPlan():
        return None
    from entrypoint.launch.rank_output import RankOutput

    return RankOutput(plan.output, restart)


class LocalRanks:
    """The running ranks, the failed ranks, and the signal that stopped the job, if any.

    When a rank fails, the others receive SIGTERM and have the grace period to save. When a rank exits because of a
    preemption, the others are about to save too, so they receive SIGTERM only after the grace period.
    """

    def __init__(self, plan: Plan, folder: Path, output: RankOutput | None = None, restart: int = 0) -> None:
        self.plan, self.output, self.restart = plan, output, restart
        # A single rank stays in the caller's session and process group, so that it can use the terminal.
        self.own_sessions = plan.launcher != "direct"
        self.folder = folder
        self.handled_signals = (*not_ignored(HANDLED), signal.SIGCHLD)
        self.blocked_signals = (*self.handled_signals, signal.SIGALRM)  # `wait_for_signal` has a timer
        self.running: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.signalled_pids: set[int] = set()
        self.killed_pids: set[int] = set()
        self.stop_signal: signal.Signals | None = None
        self.next_escalation: tuple[float, signal.Signals] | None = None
        # When to say which ranks are missing from a collective, and what was said.
        self.explain_at: float | None = None
        self.hang = ""
        self.ended: list[int] = []
        # Sessions of ranks that failed or were stopped, which still have processes.
        self.left_groups: set[int] = set()

    def start_rank(self, local_rank: int, job: Job, environ: Mapping[str, str]) -> None:
        """Fork a rank, which executes its program by the plan; an earlier failure is reported like the program's own.

        Each rank has its own session, as under torchrun. The kernel may divide CPU time by session (sched(7),
        autogroup). Ranks in a common session would then share the CPU time of a single process.
        """
        error_file = self.folder / str(local_rank) / ERROR_FILE
        error_file.parent.mkdir()
        environ = {
            **environ,
            **torchelastic_variables(self.plan, job, local_rank, self.restart),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }
        size, parent = self.plan.nodes.nproc_per_node, os.getpid()
        streams = self.output.open_rank(self.global_rank(local_rank)) if self.output else ()
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child:
            self.running[child] = local_rank
            return
        code = 1
        try:
            if self.own_sessions:
                os.setsid()
            die_with_parent()
            for number, stream in zip((1, 2), streams, strict=False):
                os.dup2(stream, number)
            os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            deferred = PREEMPTION if self.plan.program.kind == "train" else ()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, set(self.blocked_signals) - set(deferred))
            if os.getppid() == parent:
                exec_program(
                    self.plan,
                    Job(
                        launcher="local",
                        rank=local_rank,
                        world_size=size,
                        local_rank=local_rank,
                        local_world_size=size,
                        job_id=job.job_id,
                    ),
                    environ,
                )
        except UserError as error:
            code = report_error(error)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def global_rank(self, local_rank: int) -> int:
        """Return the number of a rank in the whole job."""
        return self.plan.nodes.node_rank * self.plan.nodes.nproc_per_node + local_rank

    def monitor_with_output(self) -> None:
        """Monitor the ranks while their output is relayed, until the last of it is shown."""
        if self.output:
            self.output.start()
        self.monitor()
        end_groups(self.left_groups, KILL_DELAY_S)  # they may hold a GPU
        if self.output:
            self.output.close(self.is_asked_to_end)

    def is_asked_to_end(self) -> bool:
        """Return whether a signal that ends the job has arrived since the last rank ended."""
        received = wait_for_signal(self.handled_signals, 0)
        return received is not None and received.si_signo in JOB_ENDING

    def monitor(self) -> None:
        """Forward signals to the ranks, and stop all when one fails, until no rank is left."""
        while self.running:
            due = [at for at in (self.explain_at, self.next_escalation and self.next_escalation[0]) if at]
            wait_s = max(0.0, min([POLL_INTERVAL_S, *(at - time.monotonic() for at in due)]))
            received = wait_for_signal(self.handled_signals, wait_s)
            if received and received.si_signo != signal.SIGCHLD:
                self.handle_signal(received)
            self.reap()
            if self.next_escalation and time.monotonic() >= self.next_escalation[0]:
                self.escalate(self.next_escalation[1])
                self.next_escalation = (time.monotonic() + KILL_DELAY_S, signal.SIGKILL)
            if self.explain_at and time.monotonic() >= self.explain_at:
                self.end_hang()
        self.end_hang()

    def can_restart(self) -> bool:
        """Return whether ranks have failed, and not by a signal to the job or for a reason that a restart keeps."""
        causes = {failure.exitcode for failure in self.failures if not failure.ended_by_agent}
        return bool(causes) and not self.stop_signal and causes.isdisjoint(NOT_RETRYABLE)

    def escalate(self, number: signal.Signals) -> None:
        """Send the next signal to the ranks that needed longer than the grace period; name those that are killed."""
        if number == signal.SIGKILL:
            for pid in sorted(self.running.keys() - self.killed_pids):
                log_late(f"rank {self.global_rank(self.running[pid])} (process {pid})", self.plan.grace_period_s)
            self.killed_pids |= self.running.keys()
        self.signal_all(number)

    def handle_signal(self, received: signal.struct_siginfo) -> None:
        """Forward a signal; one from the terminal goes to each rank's whole process group.

        A signal that stops the job starts the grace period. If a rank failed before for another reason, that failure
        is the cause of the stop, and not this signal.
        """
        number = signal.Signals(received.si_signo)
        if number == signal.SIGTSTP:
            self.suspend()
            return
        if number in JOB_ENDING:
            if all(failure.exitcode in (-number, 128 + number) for failure in self.failures):
                self.stop_signal = self.stop_signal or number
            self.next_escalation = self.next_escalation or (time.monotonic() + self.plan.grace_period_s, signal.SIGKILL)
        # The terminal signals its whole process group, but by a hangup only the leader of its session.
        if self.own_sessions or not from_terminal(received) or number == signal.SIGHUP:
            self.signal_all(number, process_group=from_terminal(received) or number == signal.SIGCONT)

    def suspend(self) -> None:
        """Suspend this process and all ranks until SIGCONT, if there is job control; extend the next escalation.

        The kernel ignores SIGTSTP in a process that no shell could resume: a container's first one, and one whose group
        has no parent in its session (setpgid(2)).
        """
        suspended_at = time.monotonic()
        if self.own_sessions:
            self.signal_all(signal.SIGSTOP, process_group=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTSTP])
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTSTP])
        if self.own_sessions:
            self.signal_all(signal.SIGCONT, process_group=True)
        if self.next_escalation:
            self.next_escalation = (self.next_escalation[0] + time.monotonic() - suspended_at, self.next_escalation[1])

    def signal_all(self, number: signal.Signals, *, process_group: bool = False) -> None:
        """Send a signal to all running ranks, with `process_group` to their child processes too."""
        to_group = self.own_sessions and (process_group or number == signal.SIGKILL)
        for pid in self.running:
            if number in (*JOB_ENDING, signal.SIGKILL):
                self.signalled_pids.add(pid)
            with suppress(ProcessLookupError):  # it has exited; one that was just forked has no group yet
                send = os.killpg if to_group and os.getpgid(pid) == pid else os.kill
                send(pid, number)

    def reap(self) -> None:
        """Reap all exited children, including orphans that this process adopts as PID 1."""
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self.running:
                local_rank = self.running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if self.own_sessions and (code or pid in self.signalled_pids):
                    self.left_groups |= signal_groups({pid}, signal.SIGTERM)
                if code:
                    self.record_failure(local_rank, pid, code)
                else:
                    self.ended.append(self.global_rank(local_rank))

    def record_failure(self, local_rank: int, pid: int, code: int) -> None:
        """Record a failure; the first one stops the other ranks."""
        rank = self.global_rank(local_rank)
        error_file = read_error_record(self.folder / str(local_rank) / ERROR_FILE)
        self.failures.append(
            Failure(
                rank=rank,
                local_rank=local_rank,
                pid=pid,
                exitcode=code,
                when_ns=time.time_ns(),
                ended_by_agent=pid in self.signalled_pids,
                error_file=error_file,
            )
        )
        if self.next_escalation:
            return
        if self.failures[-1].lost_peer:
            self.explain_at = self.explain_at or time.monotonic() + HANG_SETTLE_S
        elif code == ExitCode.PREEMPTED:
            self.next_escalation = (time.monotonic() + self.plan.grace_period_s, signal.SIGTERM)
        else:
            self.end_ranks()

    def end_ranks(self) -> None:
        """Send SIGTERM to all ranks that still run, and give them the grace period."""
        self.explain_at = None
        self.signal_all(signal.SIGTERM)
        self.next_escalation = (time.monotonic() + self.plan.grace_period_s, signal.SIGKILL)

    def end_hang(self) -> None:
        """Find out which ranks are missing from a failed collective, if one has failed, and end the ranks."""
        if self.explain_at and not self.next_escalation:
            running = {self.global_rank(local_rank): pid for pid, local_rank in self.running.items()}
            self.hang, stacks = explain_hang(self.failures, running, self.ended)
            for text in stacks if self.plan.nodes.nnodes == 1 else ():  # else the ranks' monitors print them
                write_stderr(text)
            self.end_ranks()
        self.explain_at = None
