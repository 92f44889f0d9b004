"""Checkpoints of spread models: a folder that every rank writes its own part into, whole or not there.

torch.distributed.checkpoint writes and reads them, and so for another number of ranks too. Its own reader would run
whatever a hostile file holds; ours takes tensors and the names that describe them, nothing else.
"""

from __future__ import annotations

import io
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_parts
from torch.distributed.checkpoint.state_dict_saver import save as save_parts

from entrypoint.core.atomic_files import sha256_of
from entrypoint.core.errors import ExitCode, UserError, first_line
from train.checkpoint import single_file
from train.checkpoint.single_file import Checkpoint, corrupt_error

T = TypeVar("T")
# Puts back what a module needs to load a state of tensors alone.
Versions = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Any]]
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# What the description of a sharded checkpoint is made of (torch.distributed.checkpoint's Metadata, pickled).
ALLOWED_GLOBALS = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13's
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool"},
}  # fmt: skip


class Ranks(Protocol):
    """What is needed of the group of all ranks."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def control(self) -> Any:
        """Process group for values on the CPU."""

    def run_on_main(self, make: Callable[[], T]) -> T:
        """Run on rank 0, and return its result on all."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value."""

    def broadcast_buffers(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's."""


@dataclass(frozen=True, kw_only=True)
class ShardedState:
    """What the ranks hold together: model, optimizer, and the average of the weights where there is one."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: nn.Module | None
    ranks: Ranks


class MetadataUnpickler(pickle.Unpickler):
    """Reads a description, and refuses any other name; see `pickle`'s manual, "Restricting Globals"."""

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the names that describe a checkpoint; raises UnpicklingError for any other."""
        if name not in ALLOWED_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's reader of a folder, whose description is not run."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what the checkpoint holds, and where."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorOnlyPlanner(DefaultLoadPlanner):
    """torch's plan of what to read, without pickled objects."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:  # noqa: ARG002
        """Refuse an object where a tensor should be."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")


def save(folder: Path, told: Checkpoint, state: ShardedState, keep: int, *, best: bool) -> Path:
    """Write a checkpoint of all ranks' parts, then remove all but the newest `keep` and the best; returns its path.

    Raises `UserError` where a rank cannot write its part, or cannot see the folder that rank 0 has made.
    """
    group = state.ranks
    path = folder / f"step-{told.step:09d}{single_file.SHARDED_SUFFIX}"
    aside = folder / f".{path.name}"
    group.broadcast_buffers(list(state.model.buffers()))
    group.run_on_main(lambda: make_temp_dir(aside))
    if not all(group.gather(aside.is_dir())):
        raise UserError(
            f"{folder}: not every node sees it, and each rank writes its part there; set TRAIN_OUTPUT_DIR to a folder"
            " that all nodes share"
        )
    writer, alone = FileSystemWriter(aside, sync_files=True), group.world_size == 1
    try:
        silence_torch_warnings()
        save_parts(sharded_tensors(state)[0], storage_writer=writer, process_group=group.control, no_dist=alone)
    except CheckpointException as error:
        raise shard_write_error(folder, error) from None
    group.run_on_main(lambda: commit(aside, path, told, keep, best=best))
    return path


def silence_torch_warnings() -> None:
    """Leave out what torch warns of: a call of its own writer, and that there is only one rank."""
    for told in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", told, UserWarning)


def make_temp_dir(aside: Path) -> None:
    """Make the hidden folder of a checkpoint; one may be left of a run that was killed."""
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise single_file.write_error(aside.parent, error) from None


def commit(aside: Path, path: Path, told: Checkpoint, keep: int, *, best: bool) -> None:
    """Give a checkpoint that all ranks have written their part of its name."""
    try:
        parts = {file.name: sha256_of(file) for file in sorted(aside.iterdir())}
        single_file.write(aside / single_file.METADATA_FILE, replace(told, parts=parts))
        shutil.rmtree(path, ignore_errors=True)
        aside.rename(path)
        single_file.prune_old(path, keep, best=best)
    except OSError as error:
        raise single_file.write_error(path.parent, error) from None


def shard_write_error(folder: Path, error: CheckpointException) -> UserError:
    """Return the refusal of a checkpoint that some rank could not write its part of."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, OSError):
        return single_file.write_error(folder, cause)
    return UserError(f"{folder}: rank {rank} cannot write its part ({first_line(cause)})", ExitCode.MACHINE)


def load(path: Path, state: ShardedState, with_versions: Versions) -> None:
    """Fill model, optimizer and average from a checkpoint; raises `UserError` where it cannot be read."""
    found, optimizer = sharded_tensors(state)
    group = state.ranks
    try:
        silence_torch_warnings()
        load_parts(
            found,
            storage_reader=SafeReader(path),
            planner=TensorOnlyPlanner(),
            process_group=group.control,
            no_dist=group.world_size == 1,
        )
    except CheckpointException as error:
        raise corrupt_error(path, next(iter(error.failures.values()))[0]) from None
    except Exception as error:  # without other ranks it raises what it meets
        raise corrupt_error(path, error) from None
    set_state_dict(
        state.model,
        state.optimizer,
        model_state_dict=with_versions(state.model, found["model"]),  # type: ignore[arg-type]
        optim_state_dict={**optimizer, **found["optimizer"]},
        options=OPTIONS,
    )
    if state.average:
        state.average.load_state_dict(with_versions(state.average, found["average"]))


def sharded_tensors(state: ShardedState) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return this rank's own tensors by name, and the optimizer's whole state; other values are the settings'."""
    model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
    moments = {name: one for name, one in optimizer.items() if isinstance(one, Tensor)}
    own: dict[str, Any] = {"model": model, "optimizer": moments}
    if state.average:
        own["average"] = state.average.state_dict()
    return own, optimizer
