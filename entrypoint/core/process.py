"""Processes: signals, commands of this project's own modules, faster start and exit with torch, names, and exec."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NoReturn

from entrypoint.core.errors import ExitCode, UserError

# In an environment of the user's the names `entrypoint` and `train` may be those of other packages, or of files in the
# working folder. A path is nobody else's, and the starter puts this project first on Python's path.
STARTER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "__main__.py")  # noqa: PTH100, PTH118, PTH120 - pathlib costs a start 5 ms


def own_command(*words: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command `entrypoint WORDS`, which no variable of Python's and no file of the user's changes."""
    return (python, "-I", STARTER, *words)


def module_command(module: str, *words: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs one of this project's modules as a program."""
    return own_command("--module", module, *words, python=python)


def start_thread(target: Callable[..., object], *args: object) -> threading.Thread:
    """Start a thread that does not keep the process; raises `UserError` where the limit of processes is reached."""
    thread = threading.Thread(target=target, args=args, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # CPython: can't start new thread
        line = "no thread can be started. Raise the limit of processes (`ulimit -u`, or the job's pids.max)."
        raise UserError(line, ExitCode.MACHINE) from error
    return thread


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection during imports, then freeze the imported objects.

    The import of torch creates many objects, which the collector would scan repeatedly (figures:
    benchmarks/README.md).
    """
    gc.disable()
    try:
        yield
    finally:
        resume_gc()


def resume_gc() -> None:
    """Enable garbage collection again, without the objects that exist."""
    gc.freeze()
    gc.enable()


def fast_exit(code: int) -> NoReturn:
    """Exit this process: run the registered exit functions and skip the rest of Python's shutdown.

    During the shutdown a thread of Gloo may abort the process (see `exit_delay`), and Triton 3.9 prints pages about
    itself. After success this does not wait for threads. After a failure it does, because a thread may still be writing
    a checkpoint.
    """
    if code:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  # as Python's own exit does
    from entrypoint.core import exit_delay

    atexit.unregister(exit_delay.delay_exit)
    atexit._run_exitfuncs()  # noqa: SLF001  # as Python's own exit does
    with suppress(OSError):  # a closed pipe: Python's own shutdown reports it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def die_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its launcher or monitor exits (prctl(2), PR_SET_PDEATHSIG).

    A killed launcher cannot stop its ranks. They would continue to run and block the other ranks.
    """
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def name_process(name: str) -> None:
    """Set this process's name, of at most 15 bytes (prctl(2), PR_SET_NAME)."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode())


def replace_process(argv: tuple[str, ...], environment: Mapping[str, str]) -> NoReturn:
    """Flush the output, and execute another program in this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], argv, environment)


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


def signal_groups(groups: set[int], number: int) -> set[int]:
    """Send a signal to process groups, 0 for none, and return those that exist."""
    existing = set()
    for group in groups:
        with suppress(OSError):
            os.killpg(group, number)
            existing.add(group)
    return existing


def end_groups(groups: set[int], delay_s: float) -> None:
    """Wait until process groups that had SIGTERM are gone, and kill after `delay_s` seconds what has ignored it."""
    deadline = time.monotonic() + delay_s
    while (left := signal_groups(groups, 0)) and time.monotonic() < deadline:
        with suppress(ChildProcessError):  # as PID 1, this process adopts and reaps orphans
            os.waitpid(-1, os.WNOHANG)
        time.sleep(0.05)
    signal_groups(left, signal.SIGKILL)
