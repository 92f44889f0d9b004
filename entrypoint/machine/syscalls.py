"""Calls of the kernel that the C library has no function for, by their numbers."""

from __future__ import annotations

import ctypes
import os
import platform

# asm/unistd.h of each architecture.
NUMBERS = {
    "x86_64": {"set_mempolicy": 238},
    "aarch64": {"set_mempolicy": 237},
    "riscv64": {"set_mempolicy": 237},
    "ppc64le": {"set_mempolicy": 261},
}


def system_call(name: str, *arguments: object) -> None:
    """Make a call of `NUMBERS` that returns 0; raises OSError where it does not, or is not known for this CPU."""
    number = NUMBERS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(0, f"{name} is not known for {platform.machine()}")
    if ctypes.CDLL(None, use_errno=True).syscall(number, *arguments) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
