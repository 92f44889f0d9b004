"""Signals that launchers, monitors and the trainer forward and handle."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable

# Signals that a parent of the program (monitor, mpirun's parent) forwards to it.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# Forwarded signals that stop the job.
TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Signals that a scheduler or user sends to a program that saves: it must not die of them before its handlers exist.
PREEMPTION = (signal.SIGUSR1, signal.SIGUSR2)
# A launcher, the terminal and its shell may each forward the same signal. Repeats within this time count once.
DUPLICATE_WINDOW_S = 1.0


def not_ignored(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals that this process does not ignore; nohup, for example, makes it ignore SIGHUP.

    A shell makes background jobs ignore SIGINT. torchrun's agent handles both signals anyway, so a job under nohup
    ends with the terminal (pytorch#67538).
    """
    return tuple(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def wait_for_signal(numbers: Iterable[signal.Signals], timeout_s: float) -> signal.struct_siginfo | None:
    """Return the first of some signals, None if none comes in time; they and SIGALRM must be blocked in all threads.

    signal.sigtimedwait returns uninitialized memory if SIGSTOP suspends this process until the time is over (seen with
    CPython 3.11 to 3.13). So a timer ends the wait.
    """
    if timeout_s <= 0:
        return signal.sigtimedwait(numbers, 0)  # does not sleep, so nothing can interrupt it
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    received = signal.sigwaitinfo({*numbers, signal.SIGALRM})
    if received.si_signo == signal.SIGALRM:
        return None
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.sigtimedwait({signal.SIGALRM}, 0)  # the timer may have ended too
    return received


def from_terminal(info: signal.struct_siginfo) -> bool:
    """Return whether the terminal sent a signal, which then reaches the parent and the program (sigaction(2))."""
    return info.si_code > 0  # SI_KERNEL


def signal_sender(process: int) -> Callable[[int], None]:
    """Return a function that signals a process; it raises ProcessLookupError once it is reaped.

    An old kernel or a seccomp filter may have no pidfd. Then the process id may be another process's by then.
    """
    try:
        pidfd = os.pidfd_open(process)
    except OSError:
        return lambda number: os.kill(process, number)
    return lambda number: signal.pidfd_send_signal(pidfd, number)
