"""Stands in for oneCCL's bindings, which no package index has: a backend `ccl` over Gloo.

It refuses what the real one (2.8.0) refuses: no transport library without I_MPI_ROOT and FI_PROVIDER_PATH, and an
abort of the process if its transport is MPI and no MPI launcher started it. Under Open MPI that transport hangs, and
another one is an error. Like the real one it has no time limit.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

MPI_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")


def create_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the process group of this rank."""
    del timeout
    for name in ("I_MPI_ROOT", "FI_PROVIDER_PATH"):
        if not Path(os.environ.get(name) or "/nowhere").is_dir():
            raise RuntimeError("oneCCL: could not initialize any transport library")
    transport = os.environ.get("CCL_ATL_TRANSPORT", "mpi")
    if transport not in ("mpi", "ofi"):
        raise RuntimeError(f"oneCCL: unexpected CCL_ATL_TRANSPORT: {transport}")
    if transport == "mpi" and "OMPI_COMM_WORLD_RANK" in os.environ:
        time.sleep(3600)
    if transport == "mpi" and not any(name in os.environ for name in MPI_RANKS):
        print("Abort(1090831) on node 0: Fatal error in internal_Init_thread", file=sys.stderr, flush=True)
        os.abort()
    if report := os.environ.get("ONECCL_REPORT"):
        names = sorted(name for name in os.environ if name.startswith(("CCL_", "I_MPI_", "FI_")))
        lines = [f"{name}={os.environ[name]}" for name in names]
        Path(f"{report}.{rank}").write_text("\n".join(lines))
    return dist.ProcessGroupGloo(store, rank, size, timedelta(days=1))


dist.Backend.register_backend("ccl", create_group, devices=["cpu"])
