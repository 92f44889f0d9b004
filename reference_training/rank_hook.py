"""Prepares a rank's interpreter: `reference_training.pth` imports this where the entrypoint has started the process.

It loads single files, because the packages that they are in may have the names of the user's.
"""

import os
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType

from reference_training.own import OWN


def load_file(name: str) -> ModuleType:
    """Return a module of `entrypoint.core`, loaded without its packages."""
    full_name = f"reference_training.{name}"
    path = os.path.join(OWN, "entrypoint", "core", f"{name}.py")  # noqa: PTH118 - pathlib costs a start 5 ms
    module = sys.modules[full_name] = ModuleType(full_name)
    module.__file__ = path
    SourceFileLoader(full_name, path).exec_module(module)
    return module


load_file("exit_delay")
if "RANK" in os.environ:
    load_file("stack_signal").install()
