"""What each command imports: a start takes no longer than it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import clean_environment

CONSOLE_COMMAND = Path(sys.executable).with_name("entrypoint")
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


# Modules of a user, under the names of Python's own and of packages that this project uses. `python -m` itself imports
# contextlib and others, so nothing can be done about these.
SHADOWED = ("json", "re", "typing", "pathlib", "dataclasses", "subprocess", "argparse", "enum", "msgspec", "train")


@pytest.mark.launch
@pytest.mark.parametrize("command", [(sys.executable, "-m", "entrypoint"), (str(CONSOLE_COMMAND),)], ids=["-m", "name"])
@pytest.mark.parametrize("words", [("plan",), ("plan", "run", "x.py"), ("verify", "1"), ("rank",)], ids=" ".join)
def test_users_own_modules_are_not_imported(tmp_path: Path, command: tuple[str, ...], words: tuple[str, ...]) -> None:
    if not Path(command[0]).exists():
        pytest.skip("needs the installed command")
    for name in SHADOWED:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('the own {name}.py of a user')")
    (tmp_path / "x.py").write_text("")
    done = subprocess.run(
        [*command, *words],
        cwd=tmp_path,
        env={**clean_environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = {"verify": "verify: process 1 is not a rank", "rank": "ENTRYPOINT_PLAN: holds no plan"}.get(
        words[0], "would"
    )
    assert said in done.stdout + done.stderr
    assert done.returncode == (0 if words[0] == "plan" else 2)


@pytest.mark.launch
def test_users_script_still_imports_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("print('my own json')")
    (tmp_path / "x.py").write_text("import json")
    for python_path in ({}, {"PYTHONPATH": str(tmp_path)}):
        done = subprocess.run(
            [sys.executable, "-m", "entrypoint", "run", "--quiet", "x.py"],
            cwd=tmp_path,
            env={**clean_environment(), **python_path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "my own json\n", "")


@pytest.mark.launch
@pytest.mark.parametrize("words", [("plan", "run", "x.py"), ("plan", "train"), ("--help",), ("run", "--help-all")])
def test_planning_commands_import_no_torch(tmp_path: Path, words: tuple[str, ...]) -> None:
    assert not imported(tmp_path, *words) & set(NEVER)


@pytest.mark.launch
def test_run_command_imports_no_trainer(tmp_path: Path) -> None:
    loaded = imported(tmp_path, "run", "--dry-run", "x.py")
    assert not {name for name in loaded if name == "train" or name.startswith(("train.", "entrypoint.tune.search"))}
