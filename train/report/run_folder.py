"""Select a run's folder, and record how to reproduce the run."""

from __future__ import annotations

import json
import platform
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from entrypoint.core.console import log_once, write_stderr
from entrypoint.core.errors import UserError, one_line, printable
from entrypoint.core.files import (
    atomic_write_text,
    exists,
    is_file,
    read_regular,
    replace_symlink,
    resolve,
    working_folder,
)
from entrypoint.core.packages import package_version
from entrypoint.core.process import own_command
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Plan
from entrypoint.rank.verify import ObservedRank
from train.checkpoint import folder as checkpoints
from train.lock_file import RunLock
from train.planning.run_selection import select_run_dir
from train.settings import TrainSettings

RECORDED_PACKAGES = (
    "torch",
    "torchvision",
    "numpy",
    "pillow",
    "intel-extension-for-pytorch",
    "intel-openmp",
    "nni",
    "reference-training",
)
COMMAND_FILE = "command.txt"


def open_folder(settings: TrainSettings, lock: RunLock) -> tuple[Path, list[Path]]:
    """Create and lock the run's folder; return it with the checkpoints to resume from, newest first.

    Raises `UserError` if it cannot be written, holds a run that must not be resumed, or is in use by another run.
    """
    output = settings.run.output_dir
    try:
        output.mkdir(parents=True, exist_ok=True)
        folder, starts = make_run_dir(settings)
        lock.acquire(folder)
        check_best(folder)
        checkpoints.remove_partial(folder / "checkpoint")
        update_latest_link(output, folder)
    except OSError as error:
        resume = settings.run.resume
        source = f"TRAIN_OUTPUT_DIR={output}" if resume in ("auto", "off") else f"TRAIN_RESUME={printable(resume)}"
        raise UserError(f"{source}: cannot be written ({error.strerror}). Set it to a writable folder.") from None
    return folder, starts


def check_best(folder: Path) -> None:
    """Raise `UserError` for a folder in the place of the link `best`, as a copy that follows links leaves it."""
    best = folder / checkpoints.FOLDER / checkpoints.BEST
    is_pointer = best.is_symlink() or checkpoints.best_checkpoint(best.parent) != best.resolve()
    if exists(best) and not is_pointer:
        raise UserError(
            f"{one_line(best)}: is in the place of the run's link to the best checkpoint. Rename or remove it."
        )


def make_run_dir(settings: TrainSettings) -> tuple[Path, list[Path]]:
    """Make the run's folder; return it with the checkpoints to resume from. Raises OSError.

    Of runs that start at the same moment, each takes a name that no other one has.
    """
    while True:
        folder, starts = select_run_dir(settings)
        is_shared = settings.run.run_name is not None or folder in [resolve(path.parent.parent) for path in starts]
        try:
            folder.mkdir(exist_ok=is_shared)
        except FileExistsError:
            if is_shared:  # a file is in its place
                raise
            continue
        return folder, starts


def update_latest_link(output: Path, folder: Path) -> None:
    """Point the link `latest` in the output folder to this run, atomically."""
    if resolve(folder.parent) != resolve(output):
        return
    link = output / "latest"
    if link.exists() and not link.is_symlink():
        write_stderr(f"train: {one_line(link)} is no link, so it is left as it is")
        return
    try:
        replace_symlink(link, folder.name)
    except OSError as error:
        if error.errno not in checkpoints.CANNOT:
            raise
        log_once(f"warning: this file system has no links, so {one_line(link)} is not made. Name the run itself.")


def write_provenance(
    folder: Path,
    given: ParsedSettings[TrainSettings],
    plan: Plan,
    ranks: list[ObservedRank],
    environ: Mapping[str, str],
    *,
    resumes: bool,
) -> None:
    """Write plan, settings, versions, what each rank really has, and the commands that reproduce the run."""
    atomic_write_text(folder / "plan.json", plan.to_json(indent=2) + "\n")
    atomic_write_text(folder / "settings.json", as_json(given.values.to_json()))
    atomic_write_text(folder / "versions.json", as_json(versions()))
    atomic_write_text(folder / "ranks.json", as_json([asdict(rank) for rank in ranks]))
    before = read_regular(folder / COMMAND_FILE) if resumes and is_file(folder / COMMAND_FILE) else ""
    lines = add_command(before.splitlines(), reproduce_command(given, plan, environ, folder.parent))
    atomic_write_text(folder / COMMAND_FILE, "".join(f"{line}\n" for line in lines))


def add_command(before: list[str], command: str) -> list[str]:
    """Return the commands of a run one after another; a last one that differs resumes what the others left."""
    resumed = command.replace(" env ", " env TRAIN_RESUME=auto TRAIN_RESUME_ALLOW_CHANGED=1 ", 1)
    return before if before and before[-1] in (command, resumed) else [*before, resumed if before else command]


def reproduce_command(given: ParsedSettings[TrainSettings], plan: Plan, environ: Mapping[str, str], runs: Path) -> str:
    """Return a shell command that trains again with the same settings, number of ranks and versions.

    `runs` is the folder that holds the run's.
    """
    not_repeated = ("TRAIN_RUN_NAME", "TRAIN_RESUME")  # they name the folder; a repeated run gets a new one
    variables = {name: value for name, value in given.as_variables().items() if name not in not_repeated}
    if resolve(runs) != resolve(given.values.run.output_dir):  # of a resumed run
        variables["TRAIN_OUTPUT_DIR"] = str(runs)
    launch = {name: environ[name] for name in environ if name.startswith("LAUNCH_") and environ[name]}
    launch |= {
        "LAUNCH_NPROC_PER_NODE": str(plan.nodes.nproc_per_node),
        "LAUNCH_RESERVE_CPUS": str(plan.binding.reserved_cpus),
        "LAUNCH_THREADS": str(plan.ranks[0].threads),  # another number would round differently
    }
    words = [f"{name}={shlex.quote(value)}" for name, value in sorted((launch | variables).items())]
    command = map(shlex.quote, own_command("train"))
    here = working_folder()
    return f"cd {shlex.quote(str(here or '.'))} && env {' '.join([*words, *command])}"


def versions() -> dict[str, str]:
    """Return the versions that affect a run's results."""
    packages = {name: package_version(name) or "not installed" for name in RECORDED_PACKAGES}
    return {"python": platform.python_version(), "kernel": platform.release(), **packages}


def as_json(data: Any) -> str:
    """Return data as indented JSON with a newline at its end; raises ValueError for a number that is not finite."""
    return json.dumps(data, indent=2, allow_nan=False) + "\n"
