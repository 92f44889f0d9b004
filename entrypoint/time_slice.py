"""The time slice that a process is scheduled with: asking for one, and reading it back."""

from __future__ import annotations

import ctypes

from entrypoint.system_call import system_call

# The policies that have slices (linux/sched.h).
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


def ask_for_time_slice(microseconds: int) -> None:
    """Have this process and what it starts scheduled in turns of this length; a real-time policy stays as it is.

    Raises OSError where the kernel or a container's seccomp filter does not allow it.
    """
    attributes = read_attributes(0)
    if attributes.policy in (SCHED_OTHER, SCHED_BATCH):
        attributes.runtime = 1000 * microseconds
        system_call("sched_setattr", 0, ctypes.byref(attributes), 0)


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
    system_call("sched_getattr", process, ctypes.byref(attributes), ctypes.sizeof(attributes), 0)
    return attributes
