"""Try whether the program's Python can use a backend of collectives or of torch.compile, and where oneCCL is.

oneCCL's bindings find no transport without variables that name it.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from entrypoint.core.console import last_error_line
from entrypoint.core.user_dirs import nearest_existing
from entrypoint.machine.interpreter import minor_version

PACKAGE = "oneccl_bindings_for_pytorch"
# Where the wheel keeps libfabric's providers; other builds may keep them elsewhere below the package.
PROVIDERS = "opt/mpi/libfabric/lib/prov"
# Where they are if MPI and libfabric are packages of their own (impi-rt).
PROVIDERS_OF_PREFIX = "lib/libfabric/prov"


class OneCcl(Struct, frozen=True):
    """The folder below which MPI's libraries are, and the one with libfabric's providers; empty if there is none."""

    folder: str = ""
    providers: str = ""


def find_oneccl(prefix: Path) -> OneCcl:
    """Look for the bindings in the site-packages below `prefix`."""
    for folder in sorted(prefix.glob(f"lib/python3*/site-packages/{PACKAGE}")):
        usual = folder / PROVIDERS
        providers = usual if usual.is_dir() else next((path for path in folder.rglob("prov") if path.is_dir()), None)
        if providers is None and (prefix / PROVIDERS_OF_PREFIX).is_dir():
            providers = prefix / PROVIDERS_OF_PREFIX
        has_mpi = next(folder.rglob("libmpi.so*"), None) or not any(prefix.glob("lib/libmpi.so*"))
        return OneCcl(str(folder if has_mpi else prefix), str(providers or ""))
    return OneCcl()


def transport_variables(oneccl: OneCcl, environ: Mapping[str, str], *, by_hydra: bool) -> dict[str, tuple[str, str]]:
    """Return the variables by which oneCCL finds its transport, each with its reason.

    Without the first two, oneCCL 2021.14 could not initialize any transport library. Its default transport is the MPI
    of Intel and MPICH: it aborts without a launcher, and under Open MPI it hangs, as it takes PMIX_RANK for its own.
    """
    wanted: dict[str, tuple[str, str]] = {}
    if oneccl.folder:
        wanted["I_MPI_ROOT"] = (oneccl.folder, "oneCCL loads its MPI library from here")
    if oneccl.providers:
        wanted["FI_PROVIDER_PATH"] = (oneccl.providers, "oneCCL loads its network providers from here")
    if not by_hydra:
        wanted["CCL_ATL_TRANSPORT"] = ("ofi", "no mpirun of Intel's or MPICH's starts the ranks")
    return {name: value for name, value in wanted.items() if not environ.get(name)}


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


IPEX = "intel_extension_for_pytorch"
DEFAULT_BACKEND = "inductor"
TRIAL_TIMEOUT_S = 300
# Compiles one addition. IPEX registers its backend when it is imported.
TRIAL = """
import sys
backend, device = sys.argv[1:]
if backend == "ipex":
    import intel_extension_for_pytorch
import torch
known = torch._dynamo.list_backends(exclude_tags=())
if backend not in known:
    sys.exit(f"torch {torch.__version__} has no such backend, only {', '.join(sorted(known))}")
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, device=device))
"""


def find_compile_problem(backend: str, device: str, versions: Mapping[str, str], python: str) -> str:
    """Return why a backend cannot be used on a device, empty if it can; `versions` are the installed packages.

    The default backend is checked by its tools. Any other one compiles an addition in a child process, which takes
    some seconds.
    """
    if backend == DEFAULT_BACKEND:
        if device == "cuda" and "triton" not in versions:
            return "needs triton, which is not installed"
        return (find_missing_build_tools() if device != "cuda" else "") or find_noexec_cache(os.environ)
    problem = failed_command([python, "-I", "-c", TRIAL, backend, device], os.environ, TRIAL_TIMEOUT_S)
    return f"cannot be used ({problem})" if problem else ""


def find_ipex_problem(device: str, versions: Mapping[str, str]) -> str:
    """Return why IPEX cannot be used, or an empty string; each IPEX version requires one minor version of torch."""
    if device != "cpu":
        return "is for CPUs"
    if IPEX not in versions:
        return "is not installed"
    if minor_version(versions[IPEX]) != minor_version(versions.get("torch", "")):
        return f"{versions[IPEX]} does not go with torch {versions.get('torch')}"
    return ""


def find_missing_build_tools() -> str:
    """Return which build tools of inductor are missing; it compiles C++ against Python's headers at run time."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    there = (("a C++ compiler", shutil.which(os.environ.get("CXX", "g++"))), ("Python.h", header.exists()))
    missing = [name for name, found in there if not found]
    return f"needs {' and '.join(missing)}: install g++ and Python's headers" if missing else ""


def find_noexec_cache(environ: Mapping[str, str]) -> str:
    """Return why inductor cannot load the libraries that it compiles: its cache is mounted noexec."""
    try:
        folder = nearest_existing(Path(environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()))
        flags = os.statvfs(folder).f_flag
    except OSError as error:
        return f"has no cache folder ({error.strerror}). Set TORCHINDUCTOR_CACHE_DIR"
    if flags & os.ST_NOEXEC:
        return f"cannot load what it compiles: {folder} is mounted noexec. Set TORCHINDUCTOR_CACHE_DIR"
    return ""
