"""Whether a backend that is asked for can be used by the program's Python: tried out, since no file tells."""

from __future__ import annotations

import subprocess

from entrypoint.core.console import last_error_line

# What proves that a backend is there, and what to do where it is not. Gloo and NCCL are in every build of torch.
IMPORT_PROBES = {
    "ccl": (
        "import torch, oneccl_bindings_for_pytorch",
        "install oneccl_bind_pt of torch's own version, from the vendor's wheel index",
    ),
    "mpi": (
        "import sys, torch.distributed as d; d.is_mpi_available() or sys.exit('this torch is built without MPI')",
        "use a torch that is built from source with MPI",
    ),
}
PROBE_TIMEOUT_S = 60


def find_backend_problem(backend: str, python: str) -> str:
    """Return why the backend cannot be used and what to do, nothing where it can; takes 2 s for ccl and mpi."""
    if backend not in IMPORT_PROBES:
        return ""
    code, advice = IMPORT_PROBES[backend]
    done = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return ""
    return f"cannot be used ({last_error_line(done.stderr, 'no reason given')}); {advice}, or set LAUNCH_BACKEND=auto"
