"""Try whether the program's Python can use a communication backend."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core.console import last_error_line
from entrypoint.machine.oneccl import OneCcl, transport_variables

# Exits with an error if this torch has no MPI. Every torch build has Gloo and NCCL.
MPI_PROBE = """
import sys, torch.distributed as dist
dist.is_mpi_available() or sys.exit("this torch is built without MPI")
"""
# One of two processes that add a number up. An import proves nothing: it succeeds without any transport.
# os._exit, because oneCCL's own end may hang.
CCL_PROBE = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
import oneccl_bindings_for_pytorch
store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("ccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=30))
total = torch.ones(1)
dist.all_reduce(total)
if total.item() != 2:
    sys.exit(f"1 + 1 is {total.item()}")
os._exit(0)
"""
# What an MPI launcher puts into a rank's environment: the probe's processes are no ranks of its job.
MPI_PREFIXES = ("PMI_", "PMIX_", "OMPI_COMM_", "OMPI_MCA_", "HYDI_", "MPI_LOCAL", "MV2_COMM_")
PROBE_TIMEOUT_S = 90


def find_backend_problem(
    backend: str, python: str, oneccl: OneCcl, environ: Mapping[str, str], *, by_hydra: bool = False
) -> str:
    """Return why the backend cannot be used and the fix, or an empty string; takes seconds for ccl and mpi.

    With `by_hydra` an mpirun of Intel's or MPICH's starts the ranks, and oneCCL may use MPI as its transport.
    """
    if backend == "mpi":
        problem = failed_command([python, "-I", "-c", MPI_PROBE], dict(environ))
        advice = "use a torch that is built from source with MPI"
    elif backend == "ccl":
        problem = try_oneccl(python, oneccl, environ, by_hydra=by_hydra)
        advice = "oneccl_bind_pt ended with torch 2.8: use the image cpu-intel with it"
    else:
        return ""
    return f"cannot be used ({problem}); {advice}, or set LAUNCH_BACKEND=auto" if problem else ""


def failed_command(command: list[str], environ: Mapping[str, str], limit_s: int = PROBE_TIMEOUT_S) -> str:
    """Return the last line of a command's error, empty if it succeeds."""
    import subprocess  # here and below, because most plans start no process

    try:
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s} s"
    return last_error_line(done.stderr, "no reason given") if done.returncode else ""


def try_oneccl(python: str, oneccl: OneCcl, environ: Mapping[str, str], *, by_hydra: bool) -> str:
    """Add a number up in two processes by oneCCL; return why that fails, empty if it does not."""
    import subprocess

    alone = {name: value for name, value in environ.items() if not name.startswith(MPI_PREFIXES)}
    if by_hydra and alone.get("CCL_ATL_TRANSPORT") == "mpi":
        del alone["CCL_ATL_TRANSPORT"]  # MPI as a transport can be tried only inside an MPI job
    transport = transport_variables(oneccl, alone, by_hydra=False)
    alone |= {name: value for name, (value, _) in transport.items()}
    with tempfile.TemporaryDirectory(prefix="entrypoint-") as folder:
        command = [python, "-I", "-c", CCL_PROBE, str(Path(folder, "store"))]
        with subprocess.Popen(
            [*command, "1"], env=alone, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as other:
            problem = failed_command([*command, "0"], alone)
            other.kill()
    return problem
