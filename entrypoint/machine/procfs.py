"""Parents of a process, its state, its files in memory, lines of /proc files, and the memory nodes of a process."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from entrypoint.machine.cpu_topology import parse_cpu_list

ROOT = Path("/")
# Letters of /proc/PID/stat (proc_pid_stat(5)) of processes that run no handler.
STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel (state D), for a disk or network file system as a rule",
    "Z": "dead, and its parent has not noticed",
    "": "no longer running",
}
STOPPED = ("T", "t", "Z", "")


def ancestors(root: Path, process: str = "self") -> Iterator[str]:
    """Yield the ids of a process's ancestors, nearest first, as far as /proc shows them."""
    parent = parent_of(root, process)
    while parent and parent != "0":
        yield parent
        parent = parent_of(root, parent)


def parent_of(root: Path, process: str) -> str:
    """Return the id of a process's parent, empty if /proc hides it."""
    lines = read_lines(root / f"proc/{process}/status")
    return next((line.split()[1] for line in lines if line.startswith("PPid:")), "")


def parent_name() -> str:
    """Return the name of this process's parent, empty if /proc hides it."""
    return "".join(read_lines(ROOT / f"proc/{os.getppid()}/comm"))


def command_words(process: str) -> list[str]:
    """Return the words of a process's command line."""
    return "\n".join(read_lines(ROOT / f"proc/{process}/cmdline")).split("\0")


def read_lines(path: Path) -> list[str]:
    """Return a file's lines, or none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def state_of(process: int) -> str:
    """Return the letter of a process's state, empty for a process that has ended."""
    return "".join(read_lines(ROOT / f"proc/{process}/stat")).rpartition(")")[2].strip()[:1]


def state_text(process: int) -> str:
    """Return why a process cannot answer, empty for one that can."""
    return STATES.get(state_of(process), "")


def memory_file(process: int, name: str) -> Path | None:
    """Return the path of a process's file in memory with exactly this name (memfd_create(2)), None without one.

    Raises OSError if the process is gone, or another user's.
    """
    link = f"/memfd:{name} (deleted)"
    return next((path for path in Path(f"/proc/{process}/fd").iterdir() if read_link(path) == link), None)


def read_link(path: Path) -> str:
    """Return what a link names, empty for a file that was closed meanwhile."""
    with suppress(OSError):
        return str(path.readlink())
    return ""


# Of set_mempolicy(2): asm/unistd.h of each architecture.
SYSCALL_NUMBERS = {"x86_64": 238, "aarch64": 237, "riscv64": 237, "ppc64le": 261}
# linux/mempolicy.h; the policy is kept across execve(2).
MPOL_BIND = 2
MAX_NODES = 1024


def bind_memory(nodes: tuple[int, ...]) -> None:
    """Allocate memory of this process and its children only on these nodes.

    Raises OSError if the kernel or a container's seccomp filter does not allow it.
    """
    import ctypes  # most ranks need none

    number = SYSCALL_NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(0, f"set_mempolicy is not known for {platform.machine()}")
    bits = ctypes.c_ulong * (MAX_NODES // ctypes.sizeof(ctypes.c_ulong) // 8)
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = bits()
    for node in nodes:
        mask[node // width] |= 1 << (node % width)
    # The kernel reads one bit less than maxnode (set_mempolicy(2), bugs).
    if ctypes.CDLL(None, use_errno=True).syscall(number, MPOL_BIND, mask, MAX_NODES + 1) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def get_memory_nodes(process: str = "self", root: Path = Path("/")) -> tuple[int, ...]:
    """Return the nodes that a process's memory is bound to or prefers, or none for the kernel's default."""
    lines = read_lines(root / f"proc/{process}/numa_maps")
    policies = (line.split()[1] for line in lines if len(line.split()) > 1)
    named = next((policy for policy in policies if policy.startswith(("bind:", "prefer:", "prefer="))), "")
    return parse_cpu_list(named.replace("=", ":").partition(":")[2]) if named else ()
