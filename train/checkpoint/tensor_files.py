"""The tensors of a checkpoint: written as safetensors files on a thread, and read after a comparison with checksums."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors, save_file
from torch import Tensor

from train.checkpoint import folder as folders
from train.checkpoint.metadata import (
    EMA,
    MODEL,
    OPTIMIZER,
    SECTIONS,
    Metadata,
    TensorEntry,
    TensorPart,
    corrupt_error,
    read_metadata,
    read_verified,
    write_metadata,
)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: its metadata, and its tensors by section, empty if each rank reads its own."""

    metadata: Metadata
    tensors: Mapping[str, Tensors] = field(default_factory=dict)

    def section(self, name: str) -> Tensors:
        """Return the tensors of a section by name."""
        return self.tensors.get(name, {})


def write_tensors(path: Path, tensors: Tensors, header: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file with this header and sync it; return its SHA-256. Raises OSError.

    It is written from the tensors' memory, without Python's lock: a copy of its bytes would be as large as the model.
    """
    try:
        # The library renames from an absolute path: a relative one fails where a mount lies over the working folder.
        save_file(without_shared_memory(tensors), path.absolute(), dict(header or {}))
    except SafetensorError as error:
        raise os_error_of(error) or error from None
    with path.open("rb") as file:
        # The library lets only the owner read its files; the folder's permissions are as the user wants them.
        with suppress(PermissionError, NotImplementedError):  # SMB's files have the mount's permissions
            os.fchmod(file.fileno(), path.parent.stat().st_mode & 0o666)
        os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def without_shared_memory(tensors: Tensors) -> dict[str, Tensor]:
    """Return contiguous tensors, of which no two share memory: the format holds each on its own.

    Layers with tied weights share theirs. A model that ties them again takes the same values twice.
    """
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, one in tensors.items():
        own = one.contiguous()
        memory = own.untyped_storage().data_ptr()  # views may begin anywhere in it
        found[name] = own.clone() if own.numel() and memory in seen else own
        seen.add(memory)
    return found


def os_error_of(error: SafetensorError) -> OSError | None:
    """Return the operating system's error that the library reports as text, None if it is another one."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


FILES = {MODEL: "model.safetensors", OPTIMIZER: "optimizer.safetensors", EMA: "ema.safetensors"}


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: tuple[int, int], *, best: bool = False) -> Path:
    """Write a checkpoint atomically, then remove all but the newest and the best that it may `keep`.

    Returns its path. `best` marks it as the best so far. Raises OSError.
    """
    folder.mkdir(exist_ok=True)
    path = folders.checkpoint_path(folder, checkpoint.metadata.step)
    temp_dir = folders.prepare(path)
    try:
        tensors = {section: named for section, named in checkpoint.tensors.items() if named}
        digests = {
            FILES[section]: write_tensors(temp_dir / FILES[section], named) for section, named in tensors.items()
        }
        index = {
            section: {
                name: TensorEntry(shape=tuple(one.shape), parts=(TensorPart(file=FILES[section], key=name),))
                for name, one in named.items()
            }
            for section, named in tensors.items()
        }
        write_metadata(temp_dir, replace(checkpoint.metadata, tensors=index), digests)
        folders.commit(temp_dir, path, keep, best=best)
    except OSError:
        with suppress(OSError):  # the cause of the first error is said; a later run removes the rest
            folders.remove_tree(temp_dir)
        raise
    return path


class CheckpointReader:
    """Reads a checkpoint's files, each of which is compared with its checksum first.

    Every method raises `CorruptCheckpoint` if a file is missing, damaged or not of this format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.parsed: tuple[str, Tensors] = ("", {})
        self.metadata, self.digests = read_metadata(path)

    def verify_files(self) -> None:
        """Compare every file with its checksum."""
        try:
            for name in self.digests:
                read_verified(self.path / name, self.digests[name])
        except (OSError, ValueError) as error:
            raise corrupt_error(self.path, error) from None

    def tensors_of(self, name: str) -> Tensors:
        """Return the tensors of a file by key; the last file is kept in memory."""
        if self.parsed[0] != name:
            try:
                self.parsed = ("", {})
                self.parsed = (name, parse_safetensors(read_verified(self.path / name, self.digests[name])))
            except Exception as error:  # torch and safetensors raise many types for unknown or inconsistent headers
                raise corrupt_error(self.path, error) from None
        return self.parsed[1]

    def parts(self, wanted: Mapping[str, range]) -> Iterator[tuple[str, slice, Tensor]]:
        """Yield (name, rows, value) of each stored part of the wanted rows, one file after the other.

        `wanted` has rows of dimension 0 by `section/name`. Rows count from the first wanted one. The end raises if the
        files have not all that the index says.
        """
        by_file: dict[str, list[tuple[str, range, TensorPart, tuple[int, ...]]]] = {}
        missing: dict[str, int] = {}
        for name, rows in wanted.items():
            section, _, own = name.partition("/")
            entry = self.metadata.tensors.get(section, {}).get(own)
            if entry is None:
                raise corrupt_error(self.path, ValueError(f"it has no tensor {name}"))
            missing[name] = len(rows) * math.prod(entry.shape[1:])
            for part in entry.parts:
                by_file.setdefault(part.file, []).append((name, rows, part, entry.shape))
        for file in sorted(by_file):
            for name, rows, part, shape in by_file[file]:
                value = self.tensors_of(file).get(part.key)
                if value is None or value.ndim != len(shape) or value.shape[1:] != shape[1:]:
                    raise corrupt_error(self.path, ValueError(f"{file} has no tensor {part.key} of the index's shape"))
                at = slice(None)
                if value.ndim:
                    first, last = max(rows.start, part.start), min(rows.stop, part.start + len(value))
                    value = value[first - part.start : max(first, last) - part.start]
                    at = slice(first - rows.start, first - rows.start + len(value))
                missing[name] -= value.numel()
                yield name, at, value
        for name, count in missing.items():
            if count:
                raise corrupt_error(self.path, ValueError(f"{name} is not complete"))

    def whole(self) -> dict[str, dict[str, Tensor]]:
        """Return all tensors by section and name, put together from their parts."""
        names = {
            f"{section}/{name}": range(entry.shape[0] if entry.shape else 1)
            for section, named in self.metadata.tensors.items()
            for name, entry in named.items()
        }
        parts: dict[str, dict[int, Tensor]] = {name: {} for name in names}
        for name, rows, value in self.parts(names):
            parts[name][rows.start or 0] = value
        found: dict[str, dict[str, Tensor]] = {section: {} for section in SECTIONS}
        for name, by_row in parts.items():
            section, _, own = name.partition("/")
            values = [by_row[row] for row in sorted(by_row)]
            found[section][own] = values[0] if len(values) == 1 else torch.cat(values or [torch.empty(0)])
        return found


class AsyncCheckpointWriter:
    """Write checkpoints on a background thread while training continues.

    All checkpoints are copied into the same memory. Why: memory that is taken and freed for each one leaves holes in
    the heap. The training fills a part of them, the next copy does not fit, and the process grows.
    """

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1, "checkpoint")
        self.pending: Future[object] | None = None
        self.buffers: dict[str, dict[str, Tensor]] = {}

    def snapshot(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> Mapping[str, Mapping[str, Tensor]]:
        """Return contiguous copies of each section's tensors on the CPU, which the next call overwrites.

        Waits for the previous checkpoint; raises its error.
        """
        self.wait()
        before, self.buffers = self.buffers, {}
        for section, named in tensors.items():
            old = before.get(section, {})
            self.buffers[section] = {name: copy_into(old.get(name), one.detach()) for name, one in named.items()}
        return self.buffers

    def submit(self, write: Callable[[], object]) -> None:
        """Wait for the previous checkpoint, then start writing this one; raises the previous one's error."""
        self.wait()
        self.pending = self.pool.submit(write)

    def wait(self) -> None:
        """Wait until the pending checkpoint is written; raises its error."""
        pending, self.pending = self.pending, None
        if pending:
            pending.result()


def copy_into(buffer: Tensor | None, value: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, in the buffer if it has this shape and type."""
    if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        buffer = torch.empty(value.shape, dtype=value.dtype)
    return buffer.copy_(value)
