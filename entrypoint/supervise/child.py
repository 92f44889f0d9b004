"""Fork and exec a child that dies with its parent, and forward signals to it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from entrypoint.core.process import die_with_parent
from entrypoint.core.signals import FORWARDED, from_terminal, not_ignored

POLL_INTERVAL_S = 0.1


def forward_signals(child: int, spoken: Callable[[int], int] | None = None) -> list[int]:
    """Pass this process's signals on to a child, once each; return the list that each one which comes is put into.

    With `spoken` the child is in a group of its own, which no terminal tells, and is told what that makes of each. A
    thread waits for them, since a handler is not told where one comes from.
    """
    asked: list[int] = []
    heard = not_ignored(FORWARDED)

    def pass_on() -> None:
        while True:
            told = signal.sigwaitinfo(heard)
            asked.append(told.si_signo)
            if spoken or not from_terminal(told):
                with suppress(ProcessLookupError):
                    os.kill(child, spoken(told.si_signo) if spoken else told.si_signo)

    threading.Thread(target=pass_on, daemon=True).start()
    return asked


def fork_exec(
    argv: tuple[str, ...],
    environment: Mapping[str, str],
    *,
    gate: int | None = None,
    stderr: int = 2,
    apart: bool = False,
) -> int:
    """Fork and become a program that the kernel asks to end with this process (prctl(2)); return its process id.

    With a `gate` it waits there first for the port that it is told as MASTER_PORT, and ends where nothing comes. One
    that is `apart` is in a group of its own, and reads nothing: a terminal would stop it. What is to be passed on waits
    here until `signals_passed_on` takes it.
    """
    parent, heard = os.getpid(), not_ignored(FORWARDED)
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    child = os.fork()
    if child:
        return child
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
        die_with_parent()
        os.dup2(stderr, 2)
        if apart:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        told = os.read(gate, 16).decode() if gate is not None else None
        if told != "" and os.getppid() == parent:
            os.execve(argv[0], argv, {**environment, **({"MASTER_PORT": told} if told else {})})
    finally:
        os._exit(127)
