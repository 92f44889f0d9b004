"""Starts this node's ranks as children of the entrypoint, monitors them and stops all when one fails.

torchrun's agent does the same, but imports torch first. The entrypoint uses it only for ranks that may restart.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from entrypoint.core.console import report_error
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import die_with_parent, name_process
from entrypoint.core.signals import FORWARDED, TERMINATING, from_terminal, not_ignored
from entrypoint.job.detect import Job
from entrypoint.job.ports import parse_port
from entrypoint.launch.failures import (
    ERROR_FILE,
    Failure,
    first_failure,
    print_final_message,
    read_error_file,
    report_stop,
)
from entrypoint.machine.oom import oom_message, read_memory
from entrypoint.machine.procfs import ROOT, ancestors
from entrypoint.plan.model import Plan
from entrypoint.rank.bootstrap import exec_program
from entrypoint.rank.rendezvous import check_port_free

# What an operator sees in the list of processes.
PROCESS_NAME = "ranks-agent"
# Ranks hear the terminal through their parent alone: what its keys do beside Ctrl-C is passed on as well.
JOB_ENDING = (*TERMINATING, signal.SIGQUIT)
HANDLED = (*FORWARDED, signal.SIGQUIT, signal.SIGTSTP)
# Of a rank that was told to end once it had its time to save, before it is killed.
KILL_DELAY_S = 5.0
# A child's end is always told; looking now and then costs nothing.
POLL_INTERVAL_S = 1.0


def run(plan: Plan, job: Job, environ: Mapping[str, str]) -> int:
    """Start this node's ranks and return the job's exit code when all have ended; `environ` is what they get.

    Raises `UserError` where the port that a person wants them to meet on is taken.
    """
    memory = read_memory(ROOT)
    name_process(PROCESS_NAME)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored by who started this, children's ends would never be told
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder, reserve_port(plan, environ) as where:
        ranks = LocalRanks(plan, Path(folder))
        signal.pthread_sigmask(signal.SIG_BLOCK, ranks.heard)
        for local_rank in range(plan.nodes.nproc_per_node):
            ranks.start(local_rank, job, {**environ, **where})
        ranks.wait()
        if not ranks.failures:
            return ExitCode.DONE
        if ranks.asked:
            return report_stop(Path(folder), ranks.asked)
        (failure, *others) = ranks.failures
        if not others and plan.nodes.world_size == 1 and failure.exitcode > 0 and not failure.word:
            return failure.exitcode  # a single program has printed its own error
        return print_final_message(*first_failure(ranks.failures, oom_message(memory, read_memory(ROOT))))


@contextmanager
def reserve_port(plan: Plan, environ: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    """Hold a port for the ranks of one node as long as they run, and yield where they meet.

    Rank 0 listens there, which Linux allows beside a socket that is bound and does not, where both ask for
    SO_REUSEADDR as torch's store does; to nobody else is the port given out meanwhile (socket(7), ip(7)).
    """
    if plan.nodes.nnodes > 1:
        yield {}
        return
    address = {"MASTER_ADDR": "127.0.0.1"}
    wanted = environ.get("MASTER_PORT", "")
    if wanted:
        check_port_free(parse_port(wanted))
        yield address
        return
    six = socket.has_dualstack_ipv6()
    with socket.socket(socket.AF_INET6 if six else socket.AF_INET) as held:
        if six:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("", 0))
        yield {**address, "MASTER_PORT": str(held.getsockname()[1])}


class LocalRanks:
    """The ranks that run, those that failed, and the signal that ended the job, if one did.

    A rank that fails ends the others, with time to save; where it has saved itself, they are about to do so too.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        # A single rank stays in the caller's session and process group, so that it can use the terminal.
        self.own_sessions = plan.launcher != "direct"
        self.folder = folder
        self.heard = (*not_ignored(HANDLED), signal.SIGCHLD)
        self.running: dict[int, int] = {}
        self.failures: list[Failure] = []
        self.told: set[int] = set()
        self.asked: signal.Signals | None = None
        self.next: tuple[float, signal.Signals] | None = None

    def start(self, local_rank: int, job: Job, environ: Mapping[str, str]) -> None:
        """Fork a rank, which becomes its program by the plan; a failure before that is told like one of the program.

        Each is a session of its own, as torchrun's are: where the kernel shares CPUs out by sessions (sched(7),
        autogroup), ranks in one would have the time of a single process beside other people's.
        """
        error_file = self.folder / str(local_rank) / ERROR_FILE
        error_file.parent.mkdir()
        environ = {
            **environ,
            **torchelastic_variables(self.plan, job, local_rank),
            "TORCHELASTIC_ERROR_FILE": str(error_file),
        }
        size, parent = self.plan.nodes.nproc_per_node, os.getpid()
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
            os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.heard)
            if os.getppid() == parent:
                exec_program(self.plan, Job("local", local_rank, size, local_rank, size, job.job_id), environ)
        except UserError as error:
            code = report_error(error)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)

    def wait(self) -> None:
        """Pass signals on to the ranks, and end all when one has failed, until none is left."""
        while self.running:
            patience = min(POLL_INTERVAL_S, max(0.0, self.next[0] - time.monotonic())) if self.next else POLL_INTERVAL_S
            heard = signal.sigtimedwait(self.heard, patience)
            if heard and heard.si_signo != signal.SIGCHLD:
                self.heed(heard)
            if self.next and time.monotonic() >= self.next[0]:
                self.tell(self.next[1])
                self.next = (time.monotonic() + KILL_DELAY_S, signal.SIGKILL)
            self.reap()

    def heed(self, heard: signal.struct_siginfo) -> None:
        """Pass a signal on, the terminal's to all that ranks have started; one that ends the job leaves time to save.

        Where one of them had failed by then, that was the cause, unless the same signal had reached it first.
        """
        number = signal.Signals(heard.si_signo)
        if number == signal.SIGTSTP:
            self.stop()
            return
        if number in JOB_ENDING:
            if all(failure.exitcode in (-number, 128 + number) for failure in self.failures):
                self.asked = self.asked or number
            self.next = self.next or (time.monotonic() + self.plan.grace_period_s, signal.SIGKILL)
        if self.own_sessions or not from_terminal(heard):  # the terminal signals its whole process group
            self.tell(number, everyone=self.own_sessions and (from_terminal(heard) or number == signal.SIGCONT))

    def stop(self) -> None:
        """Stop with all ranks until somebody says SIGCONT, unless nobody could; what they have time for waits too."""
        if not has_job_control():
            return
        since = time.monotonic()
        if self.own_sessions:
            self.tell(signal.SIGSTOP, everyone=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self.next:
            self.next = (self.next[0] + time.monotonic() - since, self.next[1])

    def tell(self, number: signal.Signals, *, everyone: bool = False) -> None:
        """Send a signal to all ranks that still run, to what they have started too where it is for everyone."""
        for pid in self.running:
            if number in (*JOB_ENDING, signal.SIGKILL):
                self.told.add(pid)
            with suppress(ProcessLookupError):
                send_signal(pid, number, everyone=self.own_sessions and (everyone or number == signal.SIGKILL))

    def reap(self) -> None:
        """Take note of all that have ended, strangers among them that PID 1 is given."""
        while self.running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            if pid in self.running:
                local_rank = self.running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                if code:
                    self.fail(local_rank, pid, code)

    def fail(self, local_rank: int, pid: int, code: int) -> None:
        """Note a failure; the first one ends the others."""
        rank = self.plan.nodes.node_rank * self.plan.nodes.nproc_per_node + local_rank
        word = read_error_file(self.folder / str(local_rank) / ERROR_FILE)
        self.failures.append(Failure(rank, local_rank, pid, code, time.time_ns(), pid in self.told, word))
        if self.next:
            return
        if code == ExitCode.PREEMPTED:
            self.next = (time.monotonic() + self.plan.grace_period_s, signal.SIGTERM)
        else:
            self.tell(signal.SIGTERM)
            self.next = (time.monotonic() + self.plan.grace_period_s, signal.SIGKILL)


def send_signal(pid: int, number: signal.Signals, *, everyone: bool) -> None:
    """Send a signal to a rank, or to its whole process group, which a rank that was just forked is yet to make.

    Raises `ProcessLookupError` for one that has ended.
    """
    if everyone:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
            return
    os.kill(pid, number)


def has_job_control() -> bool:
    """Tell whether a shell would see this process stopped: the kernel stops none in a group that has none to see it.

    That is a parent of the group in its session (setpgid(2), orphaned process group). A container's first process has
    no parent at all, and what `setsid` or a batch system has started has one in another session.
    """
    group, session = os.getpgid(0), os.getsid(0)
    for ancestor in map(int, ancestors(ROOT)):
        with suppress(ProcessLookupError):
            if os.getpgid(ancestor) != group:
                return os.getsid(ancestor) == session
    return False


def torchelastic_variables(plan: Plan, job: Job, local_rank: int) -> dict[str, str]:
    """Return what scripts may look for under torchrun beside RANK and its like (its manual, environment variables)."""
    rank, size = (
        plan.nodes.node_rank * plan.nodes.nproc_per_node + local_rank,
        plan.nodes.nnodes * plan.nodes.nproc_per_node,
    )
    return {
        **{"GROUP_RANK": str(plan.nodes.node_rank), "GROUP_WORLD_SIZE": str(plan.nodes.nnodes)},
        **{"ROLE_NAME": "default", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(size)},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"},
        **{"TORCHELASTIC_RUN_ID": job.job_id or "none", "TORCHELASTIC_USE_AGENT_STORE": "False"},
    }
