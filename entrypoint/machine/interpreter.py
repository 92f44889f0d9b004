"""Finds the Python that runs a user's script: the launcher may be installed in an environment of its own."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from entrypoint.core.errors import ExitCode, UserError, printable

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
