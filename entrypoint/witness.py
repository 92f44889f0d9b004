"""A witness beside a single rank, which has no launcher left that could say why the kernel killed it."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress

from entrypoint.errors import Exit, prefix
from entrypoint.launcher_defaults import ROOT
from entrypoint.oom import out_of_memory, read_memory
from entrypoint.rank import name_process

NAME = "rank-witness"
# What ends the rank, or tells it something, is none of the witness's business.
IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A kill that is no older than this when the rank ends is taken for its end, or for that of a process it needed.
RECENT_S = 2.0


def leave_witness() -> None:
    """Fork a process that outlives this one, and the program which this one becomes, by a moment.

    It is no child of the program, which might wait for all of its own. PID 1 gets none, since its end is that of the
    whole container; nor does a kernel without pidfd_open(2).
    """
    if os.getpid() == 1:
        return
    try:
        rank = os.pidfd_open(os.getpid())
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        os.close(rank)
        return
    try:
        if not os.fork():
            testify(rank)
    finally:
        os._exit(0)


def testify(rank: int) -> None:
    """Wait for the end of the process behind a pidfd; say so where the kernel has just killed for want of memory."""
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    name_process(NAME)
    let_go_of_all_but(2, rank)
    before = now = read_memory(ROOT)
    ended = False
    while not ended:
        ended = bool(select.select([rank], [], [], RECENT_S)[0])
        before, now = now, read_memory(ROOT)
    told = out_of_memory(before, now)
    if told:
        with suppress(OSError):  # nobody listens any more
            os.write(2, f"{prefix(Exit.RANK_FAILED)}the kernel killed a process as the rank ended: {told}\n".encode())


def let_go_of_all_but(*kept: int) -> None:
    """Close all other files: who reads what the program writes waits for the end of all that could."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with suppress(OSError):  # the listing's own
                    os.close(int(name))
