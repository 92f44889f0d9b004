"""Calls of the kernel that the C library has no function for, by their numbers."""

from __future__ import annotations

import ctypes
import os
import platform

# asm/unistd.h of each architecture.
NUMBERS = {
    "x86_64": {"set_mempolicy": 238, "sched_setattr": 314, "sched_getattr": 315},
    "aarch64": {"set_mempolicy": 237, "sched_setattr": 274, "sched_getattr": 275},
    "riscv64": {"set_mempolicy": 237, "sched_setattr": 274, "sched_getattr": 275},
    "ppc64le": {"set_mempolicy": 261, "sched_setattr": 355, "sched_getattr": 356},
}


def system_call(name: str, *arguments: object) -> None:
    """Make a call of `NUMBERS` that returns 0; raises OSError where it does not, or is not known for this CPU."""
    number = NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(0, f"{name} is not known for {platform.machine()}")
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
