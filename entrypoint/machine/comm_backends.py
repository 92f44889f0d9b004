"""Check by an import whether the program's Python can use a communication backend."""

from __future__ import annotations

import subprocess

from entrypoint.core.console import last_error_line

# The code that proves that a backend is available, and the fix if it is not. Every torch build has Gloo and NCCL.
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
    """Return why the backend cannot be used and the fix, or an empty string; imports torch for ccl and mpi."""
    if backend not in IMPORT_PROBES:
        return ""
    code, advice = IMPORT_PROBES[backend]
    done = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False
    )
    if done.returncode == 0:
        return ""
    return f"cannot be used ({last_error_line(done.stderr, 'no reason given')}); {advice}, or set LAUNCH_BACKEND=auto"
