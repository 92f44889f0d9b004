"""How long a turn at a CPU a rank asks for: threads that wait for each other want short ones, and soon."""

from __future__ import annotations

import ctypes
import os
import platform

from entrypoint.errors import Exit, Refused
from entrypoint.plan import Decision, Rank
from entrypoint.question import Question

# From this kernel on a process may ask for a time slice of its own: the shorter, the sooner it is let in again after a
# wait, for the same share of the CPU (docs.kernel.org, scheduler/sched-eevdf.rst; kernelnewbies.org/Linux_6.12).
SINCE = (6, 12)
# Measured on two cores, in turns: threads whose every core had a busy neighbour were 1.07 times as fast as with the
# kernel's 1.4 ms, a rank with loader workers on its own cores as fast; with 100 us, the shortest that the kernel grants
# (kernel/sched/syscalls.c), 1.11 and 0.9 times.
SHORT_US = 300
WHY = "threads that wait for each other get in again sooner beside busy neighbours, for the same share of the CPU"
# Numbers of sched_getattr(2) and sched_setattr(2) (asm/unistd.h), and the policies that have slices (linux/sched.h).
CALLS = {"x86_64": (315, 314), "aarch64": (275, 274), "riscv64": (275, 274), "ppc64le": (356, 355)}
SCHED_OTHER, SCHED_BATCH = 0, 3


class SchedAttr(ctypes.Structure):
    """The kernel's sched_attr, as its first version had it."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def decide_time_slice(question: Question, ranks: tuple[Rank, ...]) -> tuple[int, tuple[Decision, ...]]:
    """Return the time slice to ask for in microseconds, 0 for the kernel's own; raises `Refused` where it has none.

    Asked for where a rank has several threads: measured, one that computes alone gains nothing.
    """
    asked, kernel = question.settings.values.time_slice_us, question.machine.kernel
    if asked == "auto":
        threads = max(rank.threads for rank in ranks)
        if kernel < SINCE or threads == 1:
            return 0, ()
        return SHORT_US, (Decision("time slice", f"{SHORT_US} us", WHY),)
    why = question.why("time_slice_us", "")
    if asked == "kernel":
        return 0, (Decision("time slice", "the kernel's", why),)
    if kernel < SINCE:
        release = ".".join(str(part) for part in kernel) or "unknown"
        raise Refused(
            f"{question.settings.source['time_slice_us']}: needs Linux {SINCE[0]}.{SINCE[1]}, this one is {release};"
            " unset it",
            Exit.MACHINE,
        )
    return asked, (Decision("time slice", f"{asked} us", why),)


def ask_for_time_slice(microseconds: int) -> None:
    """Have this process and what it starts scheduled in turns of this length; a real-time policy stays as it is.

    Raises OSError where the kernel or a container's seccomp filter does not allow it.
    """
    attributes = read_attributes(0)
    if attributes.policy in (SCHED_OTHER, SCHED_BATCH):
        attributes.runtime = 1000 * microseconds
        call(1, 0, ctypes.byref(attributes), 0)


def time_slice_in_force(process: int = 0) -> int | None:
    """Return a process's time slice in microseconds, None where the kernel does not tell."""
    try:
        attributes = read_attributes(process)
    except OSError:
        return None
    return attributes.runtime // 1000 or None if attributes.policy in (SCHED_OTHER, SCHED_BATCH) else None


def read_attributes(process: int) -> SchedAttr:
    """Return how a process is scheduled (sched_getattr(2)); raises OSError."""
    attributes = SchedAttr()
    call(0, process, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    return attributes


def call(which: int, *arguments: object) -> None:
    """Make one of the two calls, which the C library has had no function for; raises OSError."""
    numbers = CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(f"sched_setattr is not known for {platform.machine()}")
    if ctypes.CDLL(None, use_errno=True).syscall(numbers[which], *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
