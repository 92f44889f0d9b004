"""`entrypoint selftest`: the tests that are useful where the program is installed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from entrypoint.cli.parser import Invocation
from entrypoint.core.console import write_stdout
from entrypoint.core.errors import ExitCode
from entrypoint.core.packages import missing_module
from entrypoint.core.process import own_command, replace_process
from entrypoint.core.user_dirs import with_fallbacks

# Images have them next to the project's other files, a checkout next to the packages.
FOLDERS = (Path("/opt/reference-training/tests"), Path(__file__).resolve().parents[3] / "tests")
STEP_LIMIT_S = 300
# Two ranks find each other through the store, without torch where there is none.
SCRIPT = """
import importlib.util, os
if importlib.util.find_spec("torch"):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2, total
    dist.destroy_process_group()
assert os.environ["WORLD_SIZE"] == "2"
"""
TRAIN = {"TRAIN_DATASET": "digits", "TRAIN_RUN_NAME": "selftest", "TRAIN_RESUME": "auto", "TRAIN_PROGRESS": "off"}


def run(invocation: Invocation) -> int:
    """Run the tests, or what a wheel can try without them."""
    folder = next((folder for folder in FOLDERS if (folder / "conftest.py").exists()), None)
    if folder:
        replace_process(selftest_command(folder), with_fallbacks(invocation.environ))
    failed = 0
    with tempfile.TemporaryDirectory(prefix="entrypoint-selftest-") as name:
        for what, words, variables in steps(Path(name)):
            began = time.monotonic()
            problem = try_step(words, {**invocation.environ, **variables}, name)
            failed += bool(problem)
            write_stdout(f"{'FAILURE' if problem else 'ok     '}  {what} ({time.monotonic() - began:.0f} s){problem}")
    return ExitCode.MACHINE if failed else ExitCode.DONE


def selftest_command(folder: Path) -> tuple[str, ...]:
    """Return the command for the tests that need only this machine."""
    config = str(folder.parent / "pyproject.toml")
    return (
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", config),
        *("-m", "not launch and not slow or selftest"),
        str(folder / "entrypoint"),
        str(folder / "train"),
    )


def steps(folder: Path) -> Iterator[tuple[str, tuple[str, ...], Mapping[str, str]]]:
    """Yield what is tried, in this order: its name, the words of the command, and its settings."""
    (folder / "x.py").write_text(SCRIPT)
    two = {"LAUNCH_NPROC_PER_NODE": "2", "LAUNCH_OVERSUBSCRIBE": "1", "LAUNCH_QUIET": "1"}
    yield "plan of a script", ("plan", "run", "x.py"), {}
    yield "two ranks", ("run", "x.py"), two
    if name := missing_module("train"):
        write_stdout(f"absent   training: no {name} here; pip install 'reference-training[train]' brings it")
        return
    output = {**TRAIN, "TRAIN_OUTPUT_DIR": str(folder), "LAUNCH_QUIET": "1"}
    yield "training on handwritten digits", ("train",), {**output, "TRAIN_STEPS": "20"}
    longer = {"TRAIN_STEPS": "40", "TRAIN_RESUME_ALLOW_CHANGED": "1"}
    yield "training on from its checkpoint", ("train",), {**output, **longer}


def try_step(words: tuple[str, ...], environ: Mapping[str, str], folder: str) -> str:
    """Run a command of ours, and return what it said if it failed."""
    try:
        done = subprocess.run(
            own_command(*words),
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=STEP_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f": it did not end within {STEP_LIMIT_S} s"
    return f": exit code {done.returncode}{os.linesep}{done.stderr}" if done.returncode else ""
