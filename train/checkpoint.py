"""Checkpoints: written whole or not at all, loaded without running anything that is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from entrypoint.errors import Refused
from train.whole import whole_file

# Settings that may differ between a run and its resumption: they change where and how, not what is learnt.
FREE = frozenset(
    {
        "output_dir",
        "run_name",
        "resume",
        "checkpoint_every",
        "keep",
        "log_interval",
        "progress",
        "tensorboard",
    }
    | {"data_dir", "cache_dir", "download", "feed", "workers", "eval_batch_size"}
)


@dataclass(frozen=True)
class Checkpoint:
    """The state after `step` steps, `epoch` of the epochs closed; `seconds` is the training time until then.

    `losses` are those of the epoch under way, a number a step.
    """

    epoch: int
    step: int
    seconds: float
    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    losses: tuple[float, ...] = ()


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write a checkpoint whole, then remove all but the newest `keep`; returns its path, raises OSError.

    It is made in memory first: where writing stops amid torch.save, by a signal or a full disk, torch raises
    `RuntimeError: unexpected pos` in place of what happened.
    """
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{checkpoint.step:09d}.pt"
    content = BytesIO()
    torch.save(dict(vars(checkpoint)), content)
    with whole_file(path) as file:
        file.write(content.getbuffer())
    for old in sorted(folder.glob("step-*.pt"))[:-keep]:
        old.unlink()
    return path


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a run's checkpoint folder, None where there is none."""
    return max(folder.glob("step-*.pt"), default=None)


def load(path: Path, settings: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint on the CPU; raises `Refused` where it is none, or of other settings than these."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint = Checkpoint(**found)
    except Exception as error:  # torch.load raises what its parsers meet: RuntimeError, UnpicklingError, EOFError…
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise Refused(f"{path}: cannot be read as a checkpoint ({cause}); name another with TRAIN_RESUME") from None
    differ = [
        f"TRAIN_{name.upper()} was {checkpoint.settings.get(name)}, is {value}"
        for name, value in settings.items()
        if name not in FREE and checkpoint.settings.get(name) != value
    ]
    if differ:
        raise Refused(f"{path}: of other settings: {'; '.join(differ)}; set them as they were, or start a new run")
    return checkpoint
