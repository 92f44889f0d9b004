"""Plan and train from Python: each starts the command of this name, as a shell would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_training.own import OWN

if TYPE_CHECKING:
    from reference_training.model import TrainedModel

Setting = str | int | float | bool | os.PathLike[str] | None
STARTER = Path(OWN, "entrypoint", "__main__.py")
# The line of a finished run that names its folder, and the beginning of an error's line.
FOLDER_LINE = re.compile(r"run folder {5}(.+)\n")
ERROR_START = "entrypoint: error: "


class RunError(RuntimeError):
    """What the command says in its error line; `code` is its exit code (docs/settings.md)."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Run:
    """A finished run: its folder, and what its summary.json says."""

    folder: Path
    summary: dict[str, Any]

    @property
    def accuracy(self) -> float:
        """Return the test images' score in percent: accuracy, or what the task has in its place."""
        return float(self.summary[f"test_{self.summary['score']}"])

    def load(self) -> TrainedModel:
        """Return the trained model."""
        from reference_training.model import load_model

        return load_model(self.folder)


def plan(data: str | os.PathLike[str] | None = None, **settings: Setting) -> dict[str, Any]:
    """Return what `train` with these arguments would do, and why, as `entrypoint plan --json` prints it.

    Raises `RunError` for settings that would be refused.
    """
    command = command_of("plan", data, {**settings, "json": ""})
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunError(error_of(done.stderr), done.returncode)
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def train(data: str | os.PathLike[str] | None = None, *, quiet: bool = False, **settings: Setting) -> Run:
    """Train on a folder of images or on the data set of the settings, and return the finished run.

    Each setting has the name of its flag: `train("photos", epochs=3, nproc_per_node=2)`. The ranks are processes of
    their own, and what they print is printed here, unless `quiet`. An interrupt stops them as Ctrl-C does in a shell.
    Raises `RunError`; its code is 75 for a run that was stopped and has saved.
    """
    command = command_of("train", data, settings)
    said = ""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                said += line
                if not quiet:
                    print(line, end="", flush=True)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
    named = FOLDER_LINE.search(said)
    if process.returncode or not named:
        raise RunError(error_of(said), process.returncode)
    folder = Path(named[1])
    return Run(folder, json.loads((folder / "summary.json").read_text()))


def command_of(verb: str, data: str | os.PathLike[str] | None, settings: dict[str, Setting]) -> list[str]:
    """Return the command line; a setting that is None is left out."""
    flags = [f"--{name.replace('_', '-')}={text_of(value)}" for name, value in settings.items() if value is not None]
    flags = ["--json" if flag == "--json=" else flag for flag in flags]
    words = ["train"] if verb == "plan" else []
    return [sys.executable, "-I", str(STARTER), verb, *words, *flags, *([os.fspath(data)] if data is not None else [])]


def text_of(value: Setting) -> str:
    """Return a value as the command line has it."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def error_of(said: str) -> str:
    """Return the error of a command, without what all of them begin with."""
    lines = [line for line in said.splitlines() if line.strip()] or ["it said nothing"]
    return lines[-1].removeprefix(ERROR_START)
