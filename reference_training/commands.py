"""Plan and train from Python: each starts the command of this name, as a shell would."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reference_training.own import OWN

if TYPE_CHECKING:
    from reference_training.model import TrainedModel

Setting = str | int | float | bool | os.PathLike[str] | None
STARTER = Path(OWN, "entrypoint", "__main__.py")
# The line of a finished run that names its folder, and what the lines of errors begin with.
FOLDER_LINE = re.compile(r"run folder {5}(.+)")
MESSAGE_START = re.compile(r"entrypoint: (error: |preempted: )?")
# Flags of the command line that are no settings of a run.
NO_SETTINGS = ("json", "help", "verbose", "evaluate", "data_dir")
# Variables of a process that is a rank of a job.
OF_A_RANK = ("RANK", "ENTRYPOINT_PLAN")


class RunError(RuntimeError):
    """What the command says in its error line; `code` is its exit code (README.md)."""

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

    Raises `RunError` for settings that would be refused, and TypeError for names that are no settings.
    """
    command = [*command_of("plan", "train"), *flags_of(data, settings), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RunError(last_message(done.stderr.splitlines()), done.returncode)
    planned: dict[str, Any] = json.loads(done.stdout)
    return planned


def train(data: str | os.PathLike[str] | None = None, *, quiet: bool = False, **settings: Setting) -> Run:
    """Train on a folder of images or on the data set of the settings, and return the finished run.

    Each setting has the name of its flag: `train("photos", epochs=3, nproc_per_node=2)`. The ranks are processes of
    their own, and what they print is printed here, unless `quiet`. An interrupt lets them save, and is raised when they
    have ended; a second one kills them. Raises `RunError`, with code 75 for a run that another signal stopped and that
    has saved, and TypeError for names that are no settings.
    """
    shown = settings.get("progress", os.environ.get("TRAIN_PROGRESS"))
    quiet = quiet or shown == "off"
    progress = {"progress": "plain"} if shown in (None, "off", "auto") else {}
    lines, code = run_command([*command_of("train"), *flags_of(data, {**settings, **progress})], quiet=quiet)
    if code:
        raise RunError(last_message(lines), code)
    named = next((found[1] for line in reversed(lines) if (found := FOLDER_LINE.fullmatch(line))), None)
    if named is None:
        raise RunError("this node has no run folder: rank 0's node has it", code)
    folder = Path(named).resolve()
    return Run(folder, json.loads((folder / "summary.json").read_text()))


def run_command(command: list[str], *, quiet: bool) -> tuple[list[str], int]:
    """Run a command to its end; return its lines and its exit code. An interrupt is passed on, and then raised."""
    lines: list[str] = []
    # A group of its own: a terminal's Ctrl-C comes here alone, and is passed on once.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        process_group=0,
    )
    assert process.stdout
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                if not quiet:
                    print(line, end="", flush=True)
            code = process.wait()
            break
        except KeyboardInterrupt as error:
            process.send_signal(signal.SIGKILL if interrupt else signal.SIGINT)
            interrupt = error
        except BaseException:  # nobody can read the output any more
            process.terminate()
            raise
    process.stdout.close()
    if interrupt:
        raise interrupt
    return lines, code


def command_of(*words: str) -> list[str]:
    """Return the command; raises `RunError` in a process that is a rank of a job, which the command would join."""
    if variable := next((name for name in OF_A_RANK if name in os.environ), ""):
        raise RunError(f"{variable} is set: this process is a rank of a job. Start from another one, or unset it.", 2)
    return [sys.executable, "-I", str(STARTER), *words]


def flags_of(data: str | os.PathLike[str] | None, settings: Mapping[str, Setting]) -> list[str]:
    """Return the settings as flags; one that is None is left out. Raises TypeError for names that are no settings."""
    if wrong := [name for name in settings if name in NO_SETTINGS]:
        raise TypeError(f"{wrong[0]} is no setting of a run; the folder of images is the first argument")
    given = {"data_dir": data, **settings}
    return [f"--{name.replace('_', '-')}={text_of(value)}" for name, value in given.items() if value is not None]


def text_of(value: Setting) -> str:
    """Return a value as the command line has it."""
    return str(int(value)) if isinstance(value, bool) else str(Path(value) if isinstance(value, os.PathLike) else value)


def last_message(lines: list[str]) -> str:
    """Return the command's own last line, without what it begins with, or else the last line of all."""
    own = [line for line in lines if MESSAGE_START.match(line)]
    return MESSAGE_START.sub("", (own or lines or ["it said nothing"])[-1], count=1)
