"""What every process that a rank forks must undo of its parent: the signal handlers."""

from __future__ import annotations

import signal


def default_signals(*_: object) -> None:
    """End quietly on SIGTERM, and leave SIGINT to the rank, which the terminal sends it too.

    A forked worker inherits the trainer's handlers, and would answer the signal that ends its whole process group
    with a traceback.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
