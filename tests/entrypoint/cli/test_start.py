"""What each command imports: a start takes no longer than it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

NEVER = ("torch", "pydantic", "numpy", "multiprocessing", "importlib.metadata")


def imported(folder: Path, *words: str) -> set[str]:
    """Return the modules that are loaded when a command has printed its plan."""
    (folder / "x.py").write_text("")
    code = "import sys; from entrypoint.__main__ import main; main(); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.split())


@pytest.mark.parametrize("words", [("plan", "run", "x.py"), ("plan", "train"), ("--help",), ("run", "--help-all")])
def test_planning_commands_import_no_torch(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert not imported(tmp_path, *words) & set(NEVER)


def test_run_command_imports_no_trainer(tmp_path: Path) -> None:
    loaded = imported(tmp_path, "run", "--dry-run", "x.py")
    assert not {name for name in loaded if name == "train" or name.startswith(("train.", "entrypoint.tune.search"))}
