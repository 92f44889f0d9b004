"""Checkpoints of sharded models: a folder into which every rank writes its shard, committed atomically.

torch.distributed.checkpoint writes and reads them, also with another number of ranks. Its own reader executes pickled
code. The reader here accepts only tensors and the classes that describe them.
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
# Restores the metadata that a module needs to load a state that consists of tensors only.
Versions = Callable[[nn.Module, Mapping[str, Tensor]], Mapping[str, Any]]
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
# Classes allowed in the pickled metadata of a sharded checkpoint (torch.distributed.checkpoint's Metadata).
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
    """Operations that a checkpoint needs from the process group."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    @property
    def control(self) -> Any:
        """Process group for values on the CPU."""

    def run_on_main(self, make: Callable[[], T]) -> T:
        """Run on rank 0 and return its result on all ranks."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value."""

    def broadcast_buffers(self, tensors: list[Tensor]) -> None:
        """Overwrite tensors with rank 0's values."""


@dataclass(frozen=True, kw_only=True)
class ShardedState:
    """Sharded state of all ranks: model, optimizer and, if enabled, the EMA model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    average: nn.Module | None
    ranks: Ranks


class MetadataUnpickler(pickle.Unpickler):
    """Unpickle checkpoint metadata with a list of allowed classes; see "Restricting Globals" in pickle's manual."""

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class; raises UnpicklingError for any other."""
        if name not in ALLOWED_GLOBALS.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


class SafeReader(FileSystemReader):
    """torch's folder reader with restricted unpickling of the metadata."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the checkpoint's metadata."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = MetadataUnpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorOnlyPlanner(DefaultLoadPlanner):
    """torch's load planner without pickled objects."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:  # noqa: ARG002
        """Raise ValueError for a pickled object."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def save(folder: Path, checkpoint: Checkpoint, state: ShardedState, keep: int, *, best: bool) -> Path:
    """Write a sharded checkpoint, then remove all but the newest `keep` and the best; returns its path.

    Raises `UserError` if a rank cannot write its shard or does not see the folder that rank 0 created.
    """
    group = state.ranks
    path = folder / f"step-{checkpoint.step:09d}{single_file.SHARDED_SUFFIX}"
    temp_dir = folder / f".{path.name}"
    group.broadcast_buffers(list(state.model.buffers()))
    group.run_on_main(lambda: make_temp_dir(temp_dir))
    if not all(group.gather(temp_dir.is_dir())):
        raise UserError(
            f"{folder}: not visible on every node, but every rank writes its shard there."
            " Set TRAIN_OUTPUT_DIR to a folder that all nodes share."
        )
    writer, alone = FileSystemWriter(temp_dir, sync_files=True), group.world_size == 1
    try:
        silence_torch_warnings()
        save_parts(sharded_tensors(state)[0], storage_writer=writer, process_group=group.control, no_dist=alone)
    except CheckpointException as error:
        raise shard_write_error(folder, error) from None
    group.run_on_main(lambda: commit(temp_dir, path, checkpoint, keep, best=best))
    return path


def silence_torch_warnings() -> None:
    """Silence two torch warnings: a deprecated call in its own writer, and a group of one rank."""
    for text in ("TypedStorage is deprecated", "torch.distributed is disabled"):
        warnings.filterwarnings("ignore", text, UserWarning)


def make_temp_dir(temp_dir: Path) -> None:
    """Create the temporary folder of a checkpoint; removes one that a killed run left behind."""
    shutil.rmtree(temp_dir, ignore_errors=True)
    try:
        temp_dir.mkdir(parents=True)
    except OSError as error:
        raise single_file.write_error(temp_dir.parent, error) from None


def commit(temp_dir: Path, path: Path, checkpoint: Checkpoint, keep: int, *, best: bool) -> None:
    """Rename a checkpoint to its final name after all ranks have written their shards."""
    try:
        parts = {file.name: sha256_of(file) for file in sorted(temp_dir.iterdir())}
        single_file.write(temp_dir / single_file.METADATA_FILE, replace(checkpoint, parts=parts))
        shutil.rmtree(path, ignore_errors=True)
        temp_dir.rename(path)
        single_file.prune_old(path, keep, best=best)
    except OSError as error:
        raise single_file.write_error(path.parent, error) from None


def shard_write_error(folder: Path, error: CheckpointException) -> UserError:
    """Return the error for a rank that cannot write its shard."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, OSError):
        return single_file.write_error(folder, cause)
    return UserError(f"{folder}: rank {rank} cannot write its shard ({first_line(cause)}).", ExitCode.MACHINE)


def load(path: Path, state: ShardedState, with_versions: Versions) -> None:
    """Load model, optimizer and EMA model from a checkpoint; raises `UserError` if it cannot be read."""
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
    except Exception as error:  # with one rank, torch raises the original error
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
    """Return this rank's tensors by name, and the optimizer's full state.

    Non-tensor values of the optimizer come from the settings.
    """
    model, optimizer = get_state_dict(state.model, state.optimizer, options=OPTIONS)
    moments = {name: one for name, one in optimizer.items() if isinstance(one, Tensor)}
    own: dict[str, Any] = {"model": model, "optimizer": moments}
    if state.average:
        own["average"] = state.average.state_dict()
    return own, optimizer
