"""Read the versions of torch and related packages from files, without an import."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from entrypoint.machine.procfs import read_lines

# Packages that a plan or the doctor reports, named like their metadata folders.
TRACKED_PACKAGES = (
    "torch",
    "torchvision",
    "intel_extension_for_pytorch",
    "oneccl_bind_pt",
    "nni",
    "torch_pruning",
    "triton",
    "torchao",
    "timm",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "apache_tvm",
    "torch_xla",
)


class Packages(Struct, frozen=True):
    """Versions by name, and what they say about torch.

    `torch_cuda` is the CUDA that torch is built for, empty for a CPU build, None without torch. `needs_torch` is the
    exact version of torch that a package's metadata requires.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    needs_torch: Mapping[str, str] = field(default_factory=dict)


def read_packages(prefix: Path) -> Packages:
    """Read the site-packages below `prefix`, the environment of this interpreter (empty if there is none)."""
    versions: dict[str, str] = {}
    needs_torch: dict[str, str] = {}
    cuda: str | None = None
    for folder in sorted(prefix.glob("lib/python3*/site-packages")):
        for entry in os.listdir(folder):
            name, _, version = entry.removesuffix(".dist-info").partition("-")
            if name in TRACKED_PACKAGES and entry.endswith(".dist-info"):
                versions[name] = version
                if required := required_torch(folder / entry / "METADATA") if name == "torchvision" else "":
                    needs_torch[name] = required
        cuda = torch_cuda_version(folder / "torch/version.py") if cuda is None else cuda
    return Packages(versions, cuda, needs_torch)


def required_torch(file: Path) -> str:
    """Return the exact version of torch that a package's metadata requires, empty if it requires none."""
    match = re.search(r"^Requires-Dist: torch ?\(?==([\w.]+)", "\n".join(read_lines(file)), re.MULTILINE)
    return match[1] if match else ""


def torch_cuda_version(file: Path) -> str | None:
    """Return the CUDA version that torch's own version.py names, empty for None, None if there is no such file."""
    lines = read_lines(file)
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", "\n".join(lines), re.MULTILINE)
    return match[1] if match else "" if lines else None


def minor_version(version: str) -> str:
    """Return a version without its last part (2.8 for 2.8.0), empty if there is no version."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""
