"""What launchers, guards and the trainer share about signals: which are passed on, which is the same one again."""

from __future__ import annotations

import signal
from collections.abc import Iterable

# What a parent of the program (guard, mpirun's) passes on to it.
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT)
# Those of them after which the job is over.
TERMINATING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A launcher, the terminal and its shell may each pass one wish on: what follows within so many seconds is the same one.
DUPLICATE_WINDOW_S = 1.0


def not_ignored(numbers: Iterable[signal.Signals]) -> tuple[signal.Signals, ...]:
    """Return the signals that whoever started this process has not had it ignore, as nohup does with SIGHUP.

    A shell has its jobs in the background ignore SIGINT. Torchrun's agent heeds both all the same, so that a job under
    nohup ends with the terminal (pytorch#67538).
    """
    return tuple(number for number in numbers if signal.getsignal(number) != signal.SIG_IGN)


def from_terminal(told: signal.struct_siginfo) -> bool:
    """Tell whether a signal came from the terminal, which tells a parent and its program alike (sigaction(2))."""
    return told.si_code > 0  # SI_KERNEL
