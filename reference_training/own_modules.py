"""Import this project's packages in a process of the user's, where `entrypoint` and `train` may be other ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

from reference_training.own import OWN

PACKAGES = ("entrypoint", "train")
LOCK = threading.RLock()
# Ours as far as they were imported, which are in `sys.modules` only while a block of `own_modules` runs.
IMPORTED: dict[str, ModuleType] = {}


def remove_packages() -> dict[str, ModuleType]:
    """Remove the modules of these packages from `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}


@contextmanager
def own_modules() -> Iterator[None]:
    """Let the names of the packages be this project's in a block; afterwards they are the user's again.

    They are for other threads too, so a block is for imports and for the building of a model.
    """
    with LOCK:
        users = remove_packages()
        sys.modules.update(IMPORTED)
        sys.path.insert(0, OWN)
        try:
            yield
        finally:
            IMPORTED.update(remove_packages())
            sys.modules.update(users)
            with suppress(ValueError):  # code of the user's may have changed the path
                sys.path.remove(OWN)
