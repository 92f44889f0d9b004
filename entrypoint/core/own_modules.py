"""Commands that run this project's own modules, by the path of its starter.

In an environment of the user's the names `entrypoint` and `train` may be those of other packages, or of files in the
working folder. A path is nobody else's, and the starter puts this project first on Python's path.
"""

from __future__ import annotations

import os
import sys

STARTER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "__main__.py")  # noqa: PTH100, PTH118, PTH120 - pathlib costs a start 5 ms


def own_command(*words: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command `entrypoint WORDS`, which no variable of Python's and no file of the user's changes."""
    return (python, "-I", STARTER, *words)


def module_command(module: str, *words: str, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command that runs one of this project's modules as a program."""
    return own_command("--module", module, *words, python=python)
