"""Where the compiled library of Winograd's convolution is; imports nothing that a plan would wait for."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

LIBRARY = "reference_training_winograd.so"


def find_winograd() -> Path | None:
    """Return the library that the set-up has compiled, next to torch; None without one."""
    torch = find_spec("torch")
    path = Path(torch.origin).parents[1] / LIBRARY if torch and torch.origin else None
    return path if path and path.exists() else None
