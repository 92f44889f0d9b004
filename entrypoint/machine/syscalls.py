"""Bind memory to NUMA nodes, by a system call that the C library does not wrap."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path

from entrypoint.machine.cpu_topology import parse_cpu_list
from entrypoint.machine.procfs import read_lines

# Of set_mempolicy(2): asm/unistd.h of each architecture.
SYSCALL_NUMBERS = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
# linux/mempolicy.h; the policy is kept across execve(2).
MEMORY_POLICY_MODES = {"preferred": 1, "bind": 2}
MAX_NODES = 1024


def bind_memory(policy: str, nodes: tuple[int, ...]) -> None:
    """Allocate memory of this process and its children only on (`bind`) or first on (`preferred`) these nodes.

    Raises OSError if the kernel or a container's seccomp filter does not allow it.
    """
    number = SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(0, f"set_mempolicy is not known for {platform.machine()}")
    bits = ctypes.c_ulong * (MAX_NODES // ctypes.sizeof(ctypes.c_ulong) // 8)
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = bits()
    for node in nodes:
        mask[node // width] |= 1 << (node % width)
    # The kernel reads one bit less than maxnode (set_mempolicy(2), bugs).
    if ctypes.CDLL(None, use_errno=True).syscall(number, MEMORY_POLICY_MODES[policy], mask, MAX_NODES + 1) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def get_memory_nodes(process: str = "self", root: Path = Path("/")) -> tuple[int, ...]:
    """Return the nodes that a process's memory is bound to or prefers, or none for the kernel's default."""
    lines = read_lines(root / f"proc/{process}/numa_maps")
    policies = (line.split()[1] for line in lines if len(line.split()) > 1)
    named = next((policy for policy in policies if policy.startswith(("bind:", "prefer:", "prefer="))), "")
    return parse_cpu_list(named.replace("=", ":").partition(":")[2]) if named else ()
