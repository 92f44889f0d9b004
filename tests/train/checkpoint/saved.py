"""Checkpoints that the tests write and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from train.checkpoint.metadata import EMA, MODEL, OPTIMIZER, DataFingerprint, Metadata
from train.checkpoint.tensor_files import Checkpoint, save_checkpoint

SETTINGS: dict[str, Any] = {"batch_size": 64, "epochs": 3, "keep_checkpoints": 2}
DATA = DataFingerprint(
    classes=("cat", "dog"), train_examples=640, test_examples=64, files="f" * 32, sample="5" * 32, content="c" * 32
)


def checkpoint(step: int, **more: Any) -> Checkpoint:
    """Return a checkpoint whose weights are the number of the step."""
    epoch, inside = divmod(step, DATA.train_examples // SETTINGS["batch_size"])
    place = {"epoch": epoch, "step": step, "examples": inside * SETTINGS["batch_size"], "losses": (0.5,) * inside}
    values: dict[str, Any] = {**place, "seconds": 2.5, "settings": SETTINGS, "data": DATA, **more}
    weight = torch.full((3, 2), float(step))
    tensors = {
        MODEL: {"w": weight, "count": torch.tensor(step)},
        OPTIMIZER: {"w.momentum_buffer": weight / 2},
        EMA: {"module.w": weight / 4},
    }
    return Checkpoint(Metadata(**values), tensors)


def save(folder: Path, step: int, keep: int = 9, *, best: bool = False, **more: Any) -> Path:
    """Write such a checkpoint and return its path."""
    return save_checkpoint(folder, checkpoint(step, **more), (keep, 1), best=best)


def model_of(path: Path) -> dict[str, Tensor]:
    """Return the weights in a checkpoint of a model that is not sharded."""
    return load_file(path / "model.safetensors")
