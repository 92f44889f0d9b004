"""Read checkpoints of version 0.1, which were pickled: only `entrypoint convert-checkpoint` does.

Classes outside of a list are refused, but torch had holes in its own reader (CVE-2026-24747 in torch 2.8). So reading a
checkpoint means to trust it.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_parts

from entrypoint.core.atomic_files import sha256_of, verify_checksum
from train.checkpoint.metadata import corrupt_error

SHARDED_SUFFIX, METADATA_FILE = ".sharded", "told.pt"  # codespell:ignore
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


@dataclass(frozen=True)
class OldCheckpoint:
    """A checkpoint of version 0.1: what it says, and its tensors by section.

    The optimizer of one file is by the number of each parameter, that of a sharded checkpoint by its name.
    """

    values: Mapping[str, Any]
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    is_sharded: bool


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


def read_old_checkpoint(path: Path) -> OldCheckpoint:
    """Return a checkpoint of version 0.1, a file or a folder; raises `CorruptCheckpoint` if it is none."""
    is_sharded = path.suffix == SHARDED_SUFFIX
    try:
        data = (path / METADATA_FILE if is_sharded else path).read_bytes()
        values = torch.load(BytesIO(verify_checksum(data)), map_location="cpu", weights_only=True)
        if is_sharded:
            verify_shards(path, values["parts"])
            return OldCheckpoint(values, *read_shards(path), is_sharded=True)
        moments = {
            f"{index}.{field}": value
            for index, state in values["optimizer"]["state"].items()
            for field, value in state.items()
            if isinstance(value, Tensor)
        }
        return OldCheckpoint(values, values["model"], moments, values["average"], is_sharded=False)
    except Exception as error:  # torch.load raises many types: RuntimeError, UnpicklingError, EOFError…
        raise corrupt_error(path, error) from None


def verify_shards(folder: Path, parts: Mapping[str, str]) -> None:
    """Raise ValueError or OSError if the checksum of a shard does not match."""
    wrong = next((name for name, digest in parts.items() if sha256_of(folder / name) != digest), None)
    if wrong or not parts:
        raise ValueError(f"the checksum of {wrong} does not match" if wrong else "it has no shards")


def read_shards(path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of model, optimizer and EMA model of a sharded checkpoint."""
    reader = SafeReader(path)
    found = {
        name: torch.empty(one.size, dtype=one.properties.dtype)
        for name, one in reader.read_metadata().state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # it reads alone
    load_parts(found, storage_reader=SafeReader(path), planner=TensorOnlyPlanner(), no_dist=True)
    sections: list[dict[str, Tensor]] = []
    for prefix in ("model.", "optimizer.state.", "average."):
        sections.append({name.removeprefix(prefix): one for name, one in found.items() if name.startswith(prefix)})
    return sections[0], sections[1], sections[2]
