"""`entrypoint selftest`: the tests that are useful where the program is installed."""

from __future__ import annotations

import sys
from pathlib import Path

from entrypoint.cli.parser import Invocation
from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.process import replace_process
from entrypoint.core.user_dirs import with_fallbacks

# Images have them next to the project's other files, a checkout next to the packages.
FOLDERS = (Path("/opt/reference-training/tests"), Path(__file__).resolve().parents[3] / "tests")


def run(invocation: Invocation) -> int:
    """Run the tests that need only this machine; raises `UserError` where there are none, as in a wheel."""
    folder = next((folder for folder in FOLDERS if (folder / "conftest.py").exists()), None)
    if folder is None:
        raise UserError(
            "selftest: the tests are in images and clones alone. `entrypoint doctor` checks this installation, and"
            " `entrypoint train` trains on handwritten digits.",
            ExitCode.MACHINE,
        )
    config = str(folder.parent / "pyproject.toml")
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", config),
        *("-m", "not launch and not slow or selftest"),
        str(folder / "entrypoint"),
        str(folder / "train"),
    )
    replace_process(command, with_fallbacks(invocation.environ))
