"""Finds the Python that runs a user's script: the launcher may be installed in an environment of its own.

Also the versions of torch and related packages there, from files, without an import.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct, field

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.machine.procfs import read_lines

PTH_FILE = "reference_training.pth"
# Set by `activate` of venv and conda.
ACTIVE_VARS = ("VIRTUAL_ENV", "CONDA_PREFIX")


class Interpreter(Struct, frozen=True):
    """A Python, and why it was chosen; `asked` if the user named it.

    `has_hook` says whether its processes import what keeps ranks of some torch versions from aborting at their end.
    """

    path: str = sys.executable
    reason: str = "the launcher's own"
    asked: bool = False
    has_hook: bool = True

    @property
    def prefix(self) -> Path:
        """Return the folder of its environment."""
        return Path(sys.prefix) if self.path == sys.executable else Path(self.path).parents[1]


def find_interpreter(wanted: str, source: str, environ: Mapping[str, str]) -> Interpreter:
    """Return the Python that the user named, else the active environment's, ours if it has torch, or PATH's.

    Raises `UserError` for a name that is no program.
    """
    if wanted:
        path = shutil.which(wanted, path=environ.get("PATH"))
        if path is None:
            raise UserError(f"{printable(source)}: no such program. Name a Python, or unset it.", ExitCode.MACHINE)
        return Interpreter(os.path.abspath(path), source, asked=True)  # noqa: PTH100 - a link's target has no packages
    has_torch = find_spec("torch") is not None
    for name in ACTIVE_VARS:
        folder = environ.get(name, "")
        path = f"{folder}/bin/python"
        if not folder or not os.access(path, os.X_OK):
            continue
        if any(entry.startswith(f"{folder}/") for entry in (f"{sys.prefix}/", *sys.path)):
            return Interpreter()  # it is the launcher's own, or what that builds on
        is_base = environ.get("CONDA_DEFAULT_ENV") == "base"  # which is active in every shell
        if not (has_torch and is_base and not any(Path(folder).glob("lib/python3*/site-packages/torch"))):
            return Interpreter(path, f"the active environment ({name}={printable(folder)})")
    if has_torch:
        return Interpreter()
    names = (shutil.which(name, path=environ.get("PATH")) for name in ("python", "python3"))
    found_on_path = next(filter(None, names), "")
    return Interpreter(found_on_path, "the one on PATH") if found_on_path else Interpreter()


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
                lines = "\n".join(read_lines(folder / entry / "METADATA") if name == "torchvision" else ())
                if match := re.search(r"^Requires-Dist: torch ?\(?==([\w.]+)", lines, re.MULTILINE):
                    needs_torch[name] = match[1]
        cuda = torch_cuda_version(folder / "torch/version.py") if cuda is None else cuda
    return Packages(versions, cuda, needs_torch)


def torch_cuda_version(file: Path) -> str | None:
    """Return the CUDA version that torch's own version.py names, empty for None, None if there is no such file."""
    lines = read_lines(file)
    match = re.search(r"^cuda\b[^=]*=\s*['\"]([\d.]+)['\"]", "\n".join(lines), re.MULTILINE)
    return match[1] if match else "" if lines else None


def minor_version(version: str) -> str:
    """Return a version without its last part (2.8 for 2.8.0), empty if there is no version."""
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""
