"""Checkpoints: written atomically with a checksum, loaded without executing pickled code."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch

from entrypoint.core.atomic_files import atomic_open, checksum_trailer, replace_symlink, sha256_of, verify_checksum
from entrypoint.core.errors import ExitCode, UserError, first_line, printable
from train.settings import TrainSettings

# Settings that may change on resume: they do not affect the trained weights.
RESUME_MAY_CHANGE = frozenset(
    {
        "output_dir",
        "run_name",
        "resume",
        "resume_allow_changed",
        "max_minutes",
        "checkpoint_every",
        "keep_checkpoints",
        "log_interval",
        "progress",
        "tensorboard",
        "profile",
        "export",
    }
    | {
        "data_dir",
        "cache_dir",
        "download",
        "data_source",
        "num_workers",
        "pin_memory",
        "prefetch_factor",
        "eval_batch_size",
    }
)
# A checkpoint is a file, or a folder of shards with a metadata file.
# Names in the format: a checkpoint of another version is not found under other ones.
SUFFIX, SHARDED_SUFFIX, METADATA_FILE = ".pt", ".sharded", "told.pt"  # codespell:ignore


@dataclass(frozen=True)
class Checkpoint:
    """State of a run after `step` steps and `epoch` finished epochs; field names are the on-disk format.

    `seconds` is the training time so far. `losses` holds one loss per step of the current epoch. `scaler` is the
    state of fp16's gradient scaler, `average` that of the EMA model. `best` is the best accuracy saved so far.
    `plan` is the plan as JSON. `classes` are the names of the classes, in the order of the model's outputs. In a
    sharded checkpoint `model`, `optimizer` and `average` are in separate files, and `parts` maps each file to its
    SHA-256. No generator state is saved: order, transforms, mixing and dropout are functions of seed, epoch, step
    and rank.
    """

    epoch: int
    step: int
    seconds: float
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    losses: tuple[float, ...] = ()
    scaler: Mapping[str, Any] = field(default_factory=dict)
    average: Mapping[str, Any] = field(default_factory=dict)
    best: float = -1.0
    plan: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


class ResumePoint(NamedTuple):
    """Checkpoint that a run resumes from: its path, its content, and one line for each corrupt one skipped."""

    path: Path
    saved: Checkpoint
    skipped: tuple[str, ...] = ()


class CorruptCheckpoint(UserError):
    """Raised for a missing or corrupt checkpoint; an older one may still be valid."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}. Set TRAIN_RESUME to another checkpoint.")
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[str]]:
        """Pickle by the reason, for the broadcast to the other ranks."""
        return CorruptCheckpoint, (self.reason,)


def save(folder: Path, checkpoint: Checkpoint, keep: int, *, best: bool = False) -> Path:
    """Write a checkpoint atomically, then remove all but the newest `keep` and the best; returns its path.

    `best` marks it as the best so far. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint.step:09d}{SUFFIX}"
    write(path, checkpoint)
    prune_old(path, keep, best=best)
    return path


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint and its checksum atomically.

    The checkpoint is serialized in memory first. If a signal or a full disk interrupts torch.save, torch hides the
    cause behind `RuntimeError: unexpected pos`.
    """
    content = BytesIO()
    torch.save(dict(vars(checkpoint)), content)
    with atomic_open(path) as file:
        file.write(content.getbuffer())
        file.write(checksum_trailer(content.getbuffer()))


def prune_old(path: Path, keep: int, *, best: bool) -> None:
    """Update the link `best` if this checkpoint is the best, then remove all but the newest `keep` and the best."""
    link = path.with_name(f"best{path.suffix}")
    if best:
        replace_symlink(link, path.name)
    for old in list_newest_first(path.parent)[keep:]:
        if old.resolve() == link.resolve():
            continue
        if old.suffix == SHARDED_SUFFIX:
            shutil.rmtree(old)
        else:
            old.unlink()


def remove_partial(folder: Path) -> None:
    """Remove partial checkpoints of runs that were killed during saving; raises OSError.

    Requires the run's lock: a partial checkpoint of a live run looks the same.
    """
    for left in (path for like in (".step-*", ".best.*") for path in folder.glob(like)):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def list_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, newest first."""
    return sorted((path for path in folder.glob("step-*") if path.suffix in (SUFFIX, SHARDED_SUFFIX)), reverse=True)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a folder, or None if there is none."""
    return next(iter(list_newest_first(folder)), None)


def load_first_valid(paths: Sequence[Path], settings: Mapping[str, Any], *, changed: bool) -> ResumePoint:
    """Return the first valid checkpoint; raises `UserError` if none is valid or its settings differ (see `load`)."""
    skipped: list[CorruptCheckpoint] = []
    for path in paths:
        try:
            saved = load(path, settings, changed=changed)
            return ResumePoint(path, saved, tuple(f"skipped {corrupt.reason}" for corrupt in skipped))
        except CorruptCheckpoint as error:
            skipped.append(error)
    if len(skipped) == 1:
        raise skipped[0]
    raise UserError(
        f"{skipped[0].reason}; {len(skipped) - 1} older checkpoints are corrupt too."
        " Set TRAIN_RESUME=off to start a new run."
    )


def load(path: Path, settings: Mapping[str, Any], *, changed: bool = False) -> Checkpoint:
    """Read a checkpoint to the CPU; raises `CorruptCheckpoint` if it is missing or corrupt.

    Raises `UserError` if the settings differ, unless `changed` allows it. The checksum is verified first, because
    torch.load does not detect flipped bits in the weights.
    """
    sharded = path.suffix == SHARDED_SUFFIX
    try:
        data = (path / METADATA_FILE if sharded else path).read_bytes()
        checkpoint = Checkpoint(**torch.load(BytesIO(verify_checksum(data)), map_location="cpu", weights_only=True))
        if sharded:
            verify_shards(path, checkpoint.parts)
    except Exception as error:  # torch.load raises many types: RuntimeError, UnpicklingError, EOFError…
        raise corrupt_error(path, error) from None
    before = with_current_names(checkpoint.settings)
    differ = [
        f"TRAIN_{name.upper()} was {before.get(name)}, is {value}"
        for name, value in settings.items()
        if name not in RESUME_MAY_CHANGE and before.get(name) != value
    ]
    if differ and not changed:
        raise UserError(
            f"{path}: saved with other settings: {', '.join(differ)}. Restore these settings, start a new run,"
            " or set TRAIN_RESUME_ALLOW_CHANGED=1 to resume anyway."
        )
    return checkpoint


def check_classes(start: ResumePoint, classes: tuple[str, ...], *, changed: bool) -> None:
    """Raise `UserError` if a checkpoint's classes differ from those of the data set.

    With `changed` other names are allowed, but not another number of classes. Checkpoints of 0.1 have no classes.
    """
    saved = start.saved.classes
    if not saved or saved == classes or (changed and len(saved) == len(classes)):
        return
    pairs = zip_longest(saved, classes, fillvalue="none")
    index, (was, now) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    raise UserError(
        f"{start.path}: saved with other classes: class {index} of {len(saved)} was {printable(was)}, is"
        f" {printable(now)} of {len(classes)}. Restore the data set or start a new run."
    )


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings under their current names: checkpoints of version 0.1 have the old ones."""
    current = {TrainSettings.RENAMED.get(name, name): value for name, value in settings.items()}
    for name, renamed in TrainSettings.RENAMED_VALUES.items():
        if isinstance(current.get(name), str):
            current[name] = renamed.get(current[name], current[name])
    return current


def verify_shards(folder: Path, parts: Mapping[str, str]) -> None:
    """Raise ValueError or OSError if the checksum of a shard does not match."""
    wrong = next((name for name, digest in parts.items() if sha256_of(folder / name) != digest), None)
    if wrong or not parts:
        raise ValueError(f"the checksum of {wrong} does not match" if wrong else "it has no shards")


def corrupt_error(path: Path, error: BaseException) -> CorruptCheckpoint:
    """Return the error for a missing or corrupt checkpoint."""
    return CorruptCheckpoint(f"{path}: cannot be read as a checkpoint ({first_line(error)})")


def write_error(folder: Path, error: OSError) -> UserError:
    """Return the error for a run's folder or checkpoints that cannot be written (no space or no permission)."""
    return UserError(
        f"{folder}: cannot be written ({error.strerror}). Free disk space or set TRAIN_OUTPUT_DIR;"
        " earlier checkpoints are kept.",
        ExitCode.MACHINE,
    )
