"""Use this project's packages in a process of the user's, where `entrypoint` and `train` may be other ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from reference_training.own import OWN

NAMES = ("entrypoint", "train")
LOCK = threading.RLock()
# Ours as far as they were imported, which are in `sys.modules` only while a block of `own_modules` runs.
OURS: dict[str, ModuleType] = {}


def take(names: tuple[str, ...]) -> dict[str, ModuleType]:
    """Take the modules of these packages out of `sys.modules`, and return them."""
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}


@contextmanager
def own_modules() -> Iterator[None]:
    """Let the names of the packages be this project's in a block; afterwards they are the user's again."""
    with LOCK:
        theirs = take(NAMES)
        sys.modules.update(OURS)
        sys.path.insert(0, OWN)
        try:
            yield
        finally:
            sys.path.remove(OWN)
            OURS.update(take(NAMES))
            sys.modules.update(theirs)
