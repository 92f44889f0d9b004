"""A witness beside a single rank, which has no launcher left that could say why the kernel killed it."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from entrypoint.errors import Exit, prefix
from entrypoint.launcher_defaults import ROOT
from entrypoint.oom import Memory, out_of_memory, read_memory
from entrypoint.rank import end_with_parent, name_process
from entrypoint.signals import PASSED_ON, heeded, is_the_terminals

# What `verify` knows witnesses by.
NAME = "rank-witness"
# A kill no older than this when the rank ends is taken for its end, or for that of a process it needed; one twice as
# old is not.
RECENT_S = 2.0


def leave_witness() -> None:
    """Fork a process that outlives by a moment the program which this process, or the other one, becomes.

    It is no child of the program, which might wait for all of its own. Where PID 1 has started this process, it is the
    program's parent: a container's init ends, and all with it, as soon as its child has. PID 1 itself gets none, since
    its end is that of the whole container; nor does a kernel without pidfd_open(2).
    """
    if os.getpid() == 1:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() == 1:
        fork_under_witness()
        return
    try:
        rank = os.pidfd_open(os.getpid())
    except OSError:
        return
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        os.close(rank)
        return
    try:
        if not os.fork():
            look_on(rank)
    finally:
        os._exit(0)


def look_on(rank: int) -> None:
    """Testify to the end of the process behind a pidfd."""
    for number in PASSED_ON:  # what the rank is told is none of the witness's business
        signal.signal(number, signal.SIG_IGN)
    name_process(NAME)
    let_go_of_all_but(2, rank)
    testify(lambda seconds: bool(select.select([rank], [], [], seconds)[0]))


def fork_under_witness() -> None:
    """Fork; the child goes on, and the kernel asks it to end with its parent, which waits for it and ends as it did."""
    parent = os.getpid()
    child = os.fork()
    if child:
        try:
            stand_over(child)
        finally:
            os._exit(Exit.RANK_FAILED)
    end_with_parent()
    if os.getppid() != parent:
        os._exit(Exit.RANK_FAILED)


def stand_over(child: int) -> NoReturn:
    """Testify to the end of a child, pass signals on until then, and end with its code, 128 and more for a signal."""
    heard = {*heeded(PASSED_ON), signal.SIGCHLD}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    name_process(NAME)
    let_go_of_all_but(2)

    def ended(seconds: float) -> bool:
        while told := signal.sigtimedwait(heard, seconds):
            if told.si_signo == signal.SIGCHLD:
                break
            if not is_the_terminals(told):
                os.kill(child, told.si_signo)
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    testify(ended)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def testify(ended: Callable[[float], bool]) -> None:
    """Wait until `ended`, asked to wait for so many seconds, says so; tell of a kill for want of memory just then."""
    told = kill_at_end(ended, lambda: read_memory(ROOT))
    if told:
        with suppress(OSError):  # nobody listens any more
            os.write(2, f"{prefix(Exit.RANK_FAILED)}the kernel killed a process as the rank ended: {told}\n".encode())


def kill_at_end(ended: Callable[[float], bool], read: Callable[[], Memory]) -> str:
    """Wait as `testify` does; return what the kernel killed for want of memory just then, nothing if it did not.

    The last reading before the end may be a moment old and have counted the kill: a rank with much memory takes a while
    to end. So it is the one before it that the kill must be newer than.
    """
    earlier = last = read()
    while not ended(RECENT_S):
        earlier, last = last, read()
    return out_of_memory(earlier, read())


def let_go_of_all_but(*kept: int) -> None:
    """Close all other files: who reads what the program writes waits for the end of all that could."""
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in kept:
                with suppress(OSError):  # the listing's own
                    os.close(int(name))
