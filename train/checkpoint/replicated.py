"""Checkpoints of a model that every rank has: rank 0 writes them, one file for each of model, optimizer and EMA."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from train.checkpoint import folder as folders
from train.checkpoint.metadata import EMA, MODEL, OPTIMIZER, write_metadata
from train.checkpoint.tensor_files import Checkpoint, whole_entries, write_tensors

FILES = {MODEL: "model.safetensors", OPTIMIZER: "optimizer.safetensors", EMA: "ema.safetensors"}


def save(folder: Path, checkpoint: Checkpoint, keep: int, *, best: bool = False) -> Path:
    """Write a checkpoint atomically, then remove all but the newest `keep` and the best; returns its path.

    `best` marks it as the best so far. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    path = folders.checkpoint_path(folder, checkpoint.metadata.step)
    temp_dir = folders.prepare(path)
    try:
        tensors = {section: named for section, named in checkpoint.tensors.items() if named}
        digests = {
            FILES[section]: write_tensors(temp_dir / FILES[section], named) for section, named in tensors.items()
        }
        write_metadata(temp_dir, replace(checkpoint.metadata, tensors=whole_entries(tensors, FILES)), digests)
        folders.commit(temp_dir, path, keep, best=best)
    except OSError:
        with suppress(OSError):  # the cause of the first error is said; a later run removes the rest
            folders.remove_tree(temp_dir)
        raise
    return path
