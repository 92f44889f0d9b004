"""`entrypoint selftest`: the tests that are useful where the program is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from entrypoint.cli.invocation import Invocation
from entrypoint.core.errors import UserError
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks

# Images have them next to the project's other files, a checkout next to the packages.
FOLDERS = (Path("/opt/reference-training/tests"), Path(__file__).resolve().parents[3] / "tests")


def run(invocation: Invocation) -> int:
    """Run the tests."""
    replace_process(selftest_command(), with_fallbacks(invocation.environ))


def selftest_command() -> tuple[str, ...]:
    """Return the command for the tests that need only this machine; raises `UserError` if there are none."""
    folder = next((folder for folder in FOLDERS if (folder / "conftest.py").exists()), None)
    if folder is None:
        raise UserError("selftest: the tests are not installed here; it runs in the images and in a checkout")
    return (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not launch or selftest",
        "-c",
        str(folder.parent / "pyproject.toml"),
        str(folder / "entrypoint"),
        str(folder / "train"),
    )
