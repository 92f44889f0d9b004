"""Lets a rank write the stacks of its Python threads into memory of its own, when a signal asks for them.

The handler runs in C without the GIL, so it answers in a rank that hangs in a collective. The file has no name. Only
the same user reaches it, by /proc/PID/fd. Each process with a plan runs this before its program (see `exit_delay`).
"""

from __future__ import annotations

import faulthandler
import os

# SIGRTMIN + 11 of the C library. A plain number, because the import of `signal` would take most of the time here.
STACK_SIGNAL = 45
FILE_NAME = "entrypoint-stacks"


def install() -> None:
    """Install the handler; a process that may have no such file goes on without it."""
    try:
        memory = os.memfd_create(FILE_NAME)
        # Appending: each answer follows the one before.
        file = os.open(f"/proc/self/fd/{memory}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        os.close(memory)
        if file > 2:  # else the program takes it for a standard stream
            faulthandler.register(STACK_SIGNAL, file=file, all_threads=True, chain=False)
        else:
            os.close(file)
    except (OSError, AttributeError, RuntimeError):
        return
