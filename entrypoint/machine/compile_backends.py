"""Check whether a backend of torch.compile can be used on this machine."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from entrypoint.core.user_dirs import nearest_existing
from entrypoint.machine.comm_backends import failed_command
from entrypoint.machine.python_packages import minor_version

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
