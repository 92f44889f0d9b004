"""Checkpoints of sharded models: every rank writes one safetensors file with its shard, rank 0 the index.

They are written on a background thread, and read with any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from entrypoint.core.errors import ExitCode, UserError, first_line
from train.checkpoint import folder as folders
from train.checkpoint.metadata import (
    EMA,
    MODEL,
    OPTIMIZER,
    Metadata,
    TensorEntry,
    TensorPart,
    corrupt_error,
    write_error,
    write_metadata,
)
from train.checkpoint.tensor_files import CheckpointReader, write_tensors
from train.distributed.process_group import ProcessGroup
from train.engine.train_step import TrainState
from train.models.registry import restore_state_metadata

OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
STATE = "state."


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One rank's rows of a tensor, from row `start` of its `shape` on; `is_part`: other ranks have the rest."""

    value: Tensor
    shape: tuple[int, ...]
    start: int
    is_part: bool


@dataclass(frozen=True, kw_only=True)
class WrittenShards:
    """What a rank reports after it wrote its file: the file's checksum and index, or why it could not be written."""

    file: str
    digest: str = ""
    entries: Mapping[str, TensorEntry] | None = None
    error: UserError | None = None


def write_shards(path: Path, shards: Mapping[str, Shard], upload: Callable[[Path], None]) -> WrittenShards:
    """Write one rank's file and upload it, and return its report."""
    try:
        digest = write_tensors(path, {name: one.value for name, one in shards.items()})
        upload(path)
    except UserError as error:
        return WrittenShards(file=path.name, error=error)
    except OSError as error:
        return WrittenShards(file=path.name, error=write_error(path.parent.parent, error))
    except Exception as error:  # the other ranks wait for this report
        cause = f"{path}: this rank cannot write its shard ({first_line(error)})"
        return WrittenShards(file=path.name, error=UserError(cause, ExitCode.MACHINE))
    entries = {
        name: TensorEntry(shape=one.shape, parts=(TensorPart(file=path.name, key=name, start=one.start),))
        for name, one in shards.items()
    }
    return WrittenShards(file=path.name, digest=digest, entries=entries)


def commit_reports(
    temp_dir: Path, path: Path, metadata: Metadata, reports: list[WrittenShards], keep: tuple[int, int], *, best: bool
) -> UserError | None:
    """Write index and checksums after all ranks have written their files, and name the checkpoint.

    Returns the error of a rank, or of this one.
    """
    failed = next((one.error for one in reports if one.error), None)
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for report in reports:
        for name, entry in (report.entries or {}).items():
            section, _, own = name.partition("/")
            before = tensors.setdefault(section, {}).get(own)
            parts = (*(before.parts if before else ()), *entry.parts)
            tensors[section][own] = TensorEntry(shape=entry.shape, parts=parts)
    try:
        if failed:
            folders.remove_tree(temp_dir)
            return failed
        digests = {one.file: one.digest for one in reports if one.entries}
        write_metadata(temp_dir, replace(metadata, tensors=tensors), digests)
        folders.commit(temp_dir, path, keep, best=best)
    except OSError as error:
        return failed or write_error(path.parent, error)
    return None


def shards_of(tensors: Mapping[str, Mapping[str, Tensor]], ranks: ProcessGroup) -> dict[str, Shard]:
    """Return this rank's part of each tensor by `section/name`; all ranks must call this.

    Tensors that are not sharded are the same on every rank.
    """
    found = {f"{section}/{name}": one for section, named in tensors.items() for name, one in named.items()}
    local = {name: one.to_local() if isinstance(one, DTensor) else one for name, one in found.items()}
    split = sorted(name for name, one in found.items() if isinstance(one, DTensor) and one.ndim)
    rows = ranks.gather([len(local[name]) for name in split], list[int])
    start = {name: sum(own[index] for own in rows[: ranks.rank]) for index, name in enumerate(split)}
    return {
        name: Shard(value=one, shape=tuple(found[name].shape), start=start.get(name, 0), is_part=name in start)
        for name, one in local.items()
    }


def load(path: Path, state: TrainState, ranks: ProcessGroup) -> None:
    """Load model, optimizer and EMA model from a checkpoint; raises `UserError` if it cannot be read.

    An EMA model is loaded only if the checkpoint has one.
    """
    reader = CheckpointReader(path)
    tensors, optimizer = sharded_tensors(state)
    has_ema = bool(reader.metadata.tensors.get(EMA))
    if not has_ema:
        tensors.pop(EMA, None)
    shards = shards_of(tensors, ranks)
    check_complete(path, reader.metadata, shards)
    wanted = {
        name: range(one.start, one.start + (len(one.value) if one.value.ndim else 1)) for name, one in shards.items()
    }
    for name, rows, value in reader.parts(wanted):
        target = shards[name].value
        with torch.no_grad():
            (target[rows] if target.ndim else target).copy_(value)
    moments: dict[str, Any] = {STATE + name: one for name, one in tensors[OPTIMIZER].items()}
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=restore_state_metadata(state.model, tensors[MODEL]),  # type: ignore[arg-type]
        optim_state_dict={**optimizer, **moments},
        options=OPTIONS,
    )
    if state.ema_model and has_ema:
        state.ema_model.load_state_dict(restore_state_metadata(state.ema_model, tensors[EMA]))


def check_complete(path: Path, metadata: Metadata, shards: Mapping[str, Shard]) -> None:
    """Raise `UserError` if a tensor is not in the checkpoint, or has another shape there."""
    for name, one in shards.items():
        section, _, own = name.partition("/")
        entry = metadata.tensors.get(section, {}).get(own)
        if entry is None or entry.shape != one.shape:
            was = "missing" if entry is None else f"of shape {'x'.join(map(str, entry.shape)) or '1'}"
            raise corrupt_error(path, ValueError(f"{name} is {was}"))


def sharded_tensors(state: TrainState) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Return this rank's tensors by section and name, and the optimizer's full state.

    Non-tensor values of the optimizer come from the settings.
    """
    model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
    moments = {
        name.removeprefix(STATE): one
        for name, one in optimizer.items()
        if isinstance(one, Tensor) and name.startswith(STATE)
    }
    own: dict[str, dict[str, Any]] = {MODEL: dict(model), OPTIMIZER: moments}
    if state.ema_model:
        own[EMA] = state.ema_model.state_dict()
    return own, optimizer
