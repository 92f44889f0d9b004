"""Delays interpreter shutdown by 100 ms so that Gloo's threads can finish.

Gloo frees its last finished collective on its own thread, which needs the GIL. During shutdown, Python ends that
thread, and the unwinding reaches a C++ destructor. The process then aborts after all its work is done
(`terminate called without an active exception`). torch 2.13.0 on Python 3.11 shows this (figures:
benchmarks/README.md).

A `.pth` file in site-packages imports this module in every interpreter that the entrypoint starts. Scripts stay
unchanged.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import time
from types import ModuleType


def own_import(name: str) -> ModuleType:
    """Import a module of this project where its packages have the user's names, and leave no name behind."""
    from reference_training.own_modules import own_modules

    with own_modules():
        return importlib.import_module(name)


EXIT_DELAY_S = 0.1
# The rank's program, set by itself: its children have the same environment, and are not the rank.
PROGRAM_VAR = "ENTRYPOINT_PROGRAM_PID"


def delay_exit() -> None:
    """Wait for the threads of a process that has used torch with other ranks.

    After an error in the program, print what to type, or note which collective failed.
    """
    from contextlib import suppress

    is_program = os.environ.get(PROGRAM_VAR) == str(os.getpid())
    error = getattr(sys, "last_value", None) if is_program else None  # what ended the program
    with suppress(Exception):  # the program may have replaced what this imports
        if error and (text := own_import("entrypoint.rank.script_errors").advice(error)):
            print(f"entrypoint: {text}", file=sys.stderr)
    if "torch" in sys.modules and os.environ.get("WORLD_SIZE", "1") != "1":
        with suppress(Exception):
            if error:
                own_import("entrypoint.core.collective_error").note_collective_error(error)
        with suppress(KeyboardInterrupt):
            time.sleep(EXIT_DELAY_S)


atexit.register(delay_exit)
if "RANK" in os.environ:
    os.environ.setdefault(PROGRAM_VAR, str(os.getpid()))
