"""Signals to whole process groups, and whether a shell can suspend and resume this one."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from entrypoint.machine.procfs import ROOT, ancestors


def send_signal(pid: int, number: signal.Signals, *, process_group: bool) -> None:
    """Send a signal to a rank, or to its whole process group if the forked rank already created it.

    Raises `ProcessLookupError` if the rank has exited.
    """
    if process_group:
        with suppress(ProcessLookupError):
            os.killpg(pid, number)
            return
    os.kill(pid, number)


def has_job_control() -> bool:
    """Return whether a shell can resume this process: its group has a parent in the same session.

    The kernel does not suspend an orphaned process group (setpgid(2)). A container's first process has no parent. The
    parent of a process that `setsid` or a batch system started is in another session.
    """
    group, session = os.getpgid(0), os.getsid(0)
    for ancestor in map(int, ancestors(ROOT)):
        with suppress(ProcessLookupError):
            if os.getpgid(ancestor) != group:
                return os.getsid(ancestor) == session
    return False
