"""Fork and exec a child that dies with its parent, and forward signals to it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from entrypoint.core.console import log
from entrypoint.core.process import FORWARDED, die_with_parent, from_terminal, not_ignored, signal_sender, start_thread

POLL_INTERVAL_S = 0.1


def forward_signals(child: int, translate: Callable[[int], int] | None = None) -> list[int]:
    """Forward this process's signals to a child, and return the list that collects each received signal.

    `translate` is for a child in its own process group, which the terminal does not signal. The child then receives
    the signal that `translate` returns. A thread waits for the signals, because a handler does not know their sender.
    """
    received: list[int] = []
    handled = not_ignored(FORWARDED)
    send = signal_sender(child)

    def forward() -> None:
        while True:
            info = signal.sigwaitinfo(handled)
            received.append(info.si_signo)
            if translate or not from_terminal(info):
                with suppress(ProcessLookupError):
                    send(translate(info.si_signo) if translate else info.si_signo)

    start_thread(forward)
    return received


def fork_exec(
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    gate: int | None = None,
    stderr: int = 2,
    own_process_group: bool = False,
    deferred: Sequence[signal.Signals] = (),
) -> int:
    """Fork a child that executes a program, and return its process id.

    The kernel sends the child SIGTERM when this process ends (prctl(2)). With `gate` the child first waits for a byte
    of that pipe, and exits if the pipe closes empty. With `own_process_group` the child reads /dev/null,
    because the terminal would stop it. Signals to forward stay blocked here until `forward_signals` handles them, and
    the `deferred` ones in the child until the program unblocks them.
    """
    parent, handled = os.getpid(), not_ignored(FORWARDED)
    signal.pthread_sigmask(signal.SIG_BLOCK, handled)
    child = os.fork()
    if child:
        return child
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(handled) - set(deferred))
        die_with_parent()
        os.dup2(stderr, 2)
        if own_process_group:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if (gate is None or os.read(gate, 1)) and os.getppid() == parent:
            os.execve(argv[0], argv, environment)
    finally:
        os._exit(127)


def has_exited(child: int) -> bool:
    """Return whether a child has exited; it stays to be reaped."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def log_late(who: str, grace_period_s: float, what: str = "was killed") -> None:
    """Print that a process needed longer than its grace period to end, and what was done."""
    log(
        f"{who} did not end within {grace_period_s:g} s (LAUNCH_GRACE_PERIOD_S) and {what}. What was not saved is lost."
    )
