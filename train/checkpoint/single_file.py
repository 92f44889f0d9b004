"""Checkpoints: written whole or not at all, sealed, and loaded without running anything that is in them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from entrypoint.core.atomic_files import atomic_open, checksum_trailer, replace_symlink, sha256_of, verify_checksum
from entrypoint.core.errors import ExitCode, UserError, first_line
from train.settings import TrainSettings

# Settings that may differ between a run and its resumption: they change where and how, not what is learnt.
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
# A checkpoint is a file, or a folder of the ranks' parts with all else in a file of its own.
SUFFIX, SHARDED_SUFFIX, METADATA_FILE = ".pt", ".sharded", "told.pt"


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` steps, `epoch` of the epochs closed; `seconds` is the training time until then.

    Of a sharded one `model`, `optimizer` and `average` lie beside it. `losses` are those of the epoch under way, a
    number a step; `scaler` is fp16's, `average` that of the weights. `best` is the best accuracy of those saved so far,
    `plan` the plan's JSON, `parts` the SHA-256 of each file of a sharded one. No generator's state is in it: order,
    transforms, mixing and what the model draws are functions of seed, epoch, step and rank.
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


class ResumePoint(NamedTuple):
    """Where a run goes on from: the checkpoint's path, what it holds, and a line for each damaged one passed over."""

    path: Path
    saved: Checkpoint
    passed: tuple[str, ...] = ()


class CorruptCheckpoint(UserError):
    """What is no checkpoint, or a damaged one: the one before may be whole."""

    def __init__(self, seen: str) -> None:
        super().__init__(f"{seen}; name another with TRAIN_RESUME")
        self.seen = seen

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[str]]:
        """Travel to the other ranks as what was seen."""
        return CorruptCheckpoint, (self.seen,)


def save(folder: Path, checkpoint: Checkpoint, keep: int, *, best: bool = False) -> Path:
    """Write a checkpoint whole, then remove all but the newest `keep` and the best; returns its path; raises OSError.

    `best` says that it is the best so far.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint.step:09d}{SUFFIX}"
    write(path, checkpoint)
    prune_old(path, keep, best=best)
    return path


def write(path: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint's file and its seal, whole or not at all.

    It is made in memory first: where writing stops amid torch.save, by a signal or a full disk, torch raises
    `RuntimeError: unexpected pos` in place of what happened.
    """
    content = BytesIO()
    torch.save(dict(vars(checkpoint)), content)
    with atomic_open(path) as file:
        file.write(content.getbuffer())
        file.write(checksum_trailer(content.getbuffer()))


def prune_old(path: Path, keep: int, *, best: bool) -> None:
    """Let `best` point to a new checkpoint that is the best so far, then remove all but the newest `keep` and it."""
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
    """Remove what runs that were killed amid saving have left hidden in a checkpoint folder; raises OSError.

    Only for whom holds the run's lock: a live run's next checkpoint looks the same.
    """
    for left in (path for like in (".step-*", ".best.*") for path in folder.glob(like)):
        if left.is_dir():
            shutil.rmtree(left)
        else:
            left.unlink()


def list_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a run's checkpoint folder."""
    return sorted((path for path in folder.glob("step-*") if path.suffix in (SUFFIX, SHARDED_SUFFIX)), reverse=True)


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run's checkpoint folder, None where there is none."""
    return next(iter(list_newest_first(folder)), None)


def load_first_valid(paths: Sequence[Path], settings: Mapping[str, Any], *, changed: bool) -> ResumePoint:
    """Return the first valid checkpoint; raises `UserError` where none is, or of other settings (see `load`)."""
    passed: list[CorruptCheckpoint] = []
    for path in paths:
        try:
            saved = load(path, settings, changed=changed)
            return ResumePoint(path, saved, tuple(f"passed over {one.seen}" for one in passed))
        except CorruptCheckpoint as error:
            passed.append(error)
    if len(passed) == 1:
        raise passed[0]
    raise UserError(f"{passed[0].seen}, nor can the {len(passed) - 1} before it; start a new run with TRAIN_RESUME=off")


def load(path: Path, settings: Mapping[str, Any], *, changed: bool = False) -> Checkpoint:
    """Read a checkpoint on the CPU; raises `Unreadable` where it is none or damaged.

    One of other settings is refused with what differs, unless they may have `changed`. torch.load takes weights with a
    bit flipped for good, so the seal is looked at first.
    """
    sharded = path.suffix == SHARDED_SUFFIX
    try:
        data = (path / METADATA_FILE if sharded else path).read_bytes()
        checkpoint = Checkpoint(**torch.load(BytesIO(verify_checksum(data)), map_location="cpu", weights_only=True))
        if sharded:
            verify_shards(path, checkpoint.parts)
    except Exception as error:  # torch.load raises what its parsers meet: RuntimeError, UnpicklingError, EOFError…
        raise corrupt_error(path, error) from None
    before = with_current_names(checkpoint.settings)
    differ = [
        f"TRAIN_{name.upper()} was {before.get(name)}, is {value}"
        for name, value in settings.items()
        if name not in RESUME_MAY_CHANGE and before.get(name) != value
    ]
    if differ and not changed:
        raise UserError(
            f"{path}: of other settings: {'; '.join(differ)}; set them as they were, start a new run, or go on all"
            " the same with TRAIN_RESUME_ALLOW_CHANGED=1"
        )
    return checkpoint


def with_current_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings under their current names: checkpoints of version 0.1 have the old ones."""
    current = {TrainSettings.RENAMED.get(name, name): value for name, value in settings.items()}
    for name, renamed in TrainSettings.RENAMED_VALUES.items():
        if isinstance(current.get(name), str):
            current[name] = renamed.get(current[name], current[name])
    return current


def verify_shards(folder: Path, parts: Mapping[str, str]) -> None:
    """Raise ValueError or OSError where a rank's part is not what it was when the checkpoint was closed."""
    wrong = next((name for name, digest in parts.items() if sha256_of(folder / name) != digest), None)
    if wrong or not parts:
        raise ValueError(f"the checksum of {wrong} does not match" if wrong else "it has no parts")


def corrupt_error(path: Path, error: BaseException) -> CorruptCheckpoint:
    """Return the refusal of what is no checkpoint, or a damaged one."""
    return CorruptCheckpoint(f"{path}: cannot be read as a checkpoint ({first_line(error)})")


def write_error(folder: Path, error: OSError) -> UserError:
    """Return the refusal of a checkpoint that there is no room or no right to write."""
    return UserError(
        f"{folder}: cannot be written ({error.strerror}); the checkpoints before are kept", ExitCode.MACHINE
    )
