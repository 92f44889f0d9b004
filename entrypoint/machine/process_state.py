"""The state of a process, as far as it says why the process does nothing."""

from __future__ import annotations

from entrypoint.machine.procfs import ROOT, read_lines

# Letters of /proc/PID/stat (proc_pid_stat(5)) of processes that run no handler.
STATES = {
    "T": "stopped (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "waiting in the kernel (state D), for a disk or network file system as a rule",
    "Z": "dead, and its parent has not noticed",
    "": "no longer running",
}
STOPPED = ("T", "t", "Z", "")


def state_of(process: int) -> str:
    """Return the letter of a process's state, empty for a process that has ended."""
    text = "".join(read_lines(ROOT / f"proc/{process}/stat"))
    return text.rpartition(")")[2].strip()[:1]


def state_text(process: int) -> str:
    """Return why a process cannot answer, empty for one that can."""
    return STATES.get(state_of(process), "")
