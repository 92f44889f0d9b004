"""Whether a backend that is asked for can be used by the program's Python: tried out, since no file tells."""

from __future__ import annotations

import subprocess

from entrypoint.core.console import last_line

# What proves that a backend is there, and what to do where it is not. Gloo and NCCL are in every build of torch.
PROOFS = {
    "ccl": (
        "import torch, oneccl_bindings_for_pytorch",
        "install oneccl_bind_pt of torch's own version, from the vendor's wheel index",
    ),
    "mpi": (
        "import sys, torch.distributed as d; d.is_mpi_available() or sys.exit('this torch is built without MPI')",
        "use a torch that is built from source with MPI",
    ),
}
LIMIT_S = 60


def problem_of(backend: str, python: str) -> str:
    """Return why the backend cannot be used and what to do, nothing where it can; takes 2 s for ccl and mpi."""
    if backend not in PROOFS:
        return ""
    code, advice = PROOFS[backend]
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode == 0:
        return ""
    return f"cannot be used ({last_line(done.stderr, 'no reason given')}); {advice}, or set LAUNCH_BACKEND=auto"
