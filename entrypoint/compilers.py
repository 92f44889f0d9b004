"""Which backends of torch.compile can be used here: told by what is installed, without importing torch."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from entrypoint.checks import second_number

IPEX = "intel_extension_for_pytorch"
# What each needs beside torch, by the name of its wheel's folder; inductor, cudagraphs, onnxrt and ipex need more.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "inductor": (),
    "cudagraphs": (),
    "ipex": (),
    "onnxrt": ("onnxruntime", "onnxscript"),
    "tvm": ("apache_tvm",),
    "openxla": ("torch_xla",),
    "aot_eager": (),
    "eager": (),
}


def compiler_problem(backend: str, device: str, versions: Mapping[str, str]) -> str:
    """Say why a backend cannot be used on a device, nothing where it can; `versions` are the packages installed."""
    missing = [name for name in PACKAGES[backend] if name not in versions]
    if missing:
        return f"needs {' and '.join(missing)}, which is not installed"
    if backend == "onnxrt" and not old_onnxscript(versions["onnxscript"]):
        return f"needs onnxscript before 0.4, since it calls what is gone from {versions['onnxscript']}"
    if backend == "cudagraphs" and device != "cuda":
        return "is for GPUs"
    if backend == "ipex":
        return ipex_problem(device, versions)
    if backend == "inductor" and device == "cuda":
        return "" if "triton" in versions else "needs triton, which is not installed"
    return missing_tools() if backend == "inductor" else ""


def ipex_problem(device: str, versions: Mapping[str, str]) -> str:
    """Say why Intel's extension cannot be used, nothing where it can: it goes with one minor version of torch."""
    if device != "cpu":
        return "is for CPUs"
    if IPEX not in versions:
        return "is not installed"
    if second_number(versions[IPEX]) != second_number(versions.get("torch", "")):
        return f"{versions[IPEX]} does not go with torch {versions.get('torch')}"
    return ""


def old_onnxscript(version: str) -> bool:
    """Tell whether a version is one that still has `dynamo_export`, which torch's backend calls."""
    return version.startswith("0.") and (second_number(version) or 0) < 4


def missing_tools() -> str:
    """Say what of inductor's tools is missing, which compiles C++ against Python's headers at run time."""
    there = (("a C++ compiler", shutil.which(os.environ.get("CXX", "g++"))), ("Python.h", headers().exists()))
    missing = [name for name, found in there if not found]
    return f"needs {' and '.join(missing)}: install g++ and Python's headers" if missing else ""


def headers() -> Path:
    """Return where this Python's C header lies."""
    return Path(sysconfig.get_path("include")) / "Python.h"
