"""Where the set-up puts the compiled kernels, and how they are loaded; imports nothing that a plan would wait for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

Name = Literal["jpeg", "winograd"]
# The package that each kernel was compiled for. Its library is next to that.
PACKAGES: dict[Name, str] = {"jpeg": "PIL", "winograd": "torch"}
Functions = TypeVar("Functions")


def find_kernel(name: Name) -> Path | None:
    """Return the library of a kernel, None if the set-up has compiled none."""
    package = find_spec(PACKAGES[name])
    path = Path(package.origin).parents[1] / f"reference_training_{name}.so" if package and package.origin else None
    return path if path and path.exists() else None


def load_kernel(name: Name, load: Callable[[Path], Functions]) -> Functions | None:
    """Return what `load` makes of a kernel's library, None where there is none that can be used."""
    path = find_kernel(name)
    try:
        return load(path) if path else None
    except (OSError, AttributeError):
        return None
