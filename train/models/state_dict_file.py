"""Read a state dict from a file that may be anybody's: safetensors, or what `torch.save` writes.

A pickle can name any function to call. Here only the few that build tensors are known, and they are this module's own.
Whatever else a file holds, such as an optimizer or a program's arguments, becomes an object that does nothing.
"""

from __future__ import annotations

import io
import math
import pickle
import shlex
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from entrypoint.core.errors import UserError, first_line, one_line, printable
from entrypoint.core.files import is_file
from train.checkpoint.metadata import read_bytes
from train.models.weights_origin import INDEX_ENDING

# Keys below which training programs keep the weights, the best ones first: timm and torchvision keep an average too.
WEIGHT_KEYS = (
    *("model_ema", "state_dict_ema", "params_ema", "ema", "state_dict", "model", "model_state_dict"),
    *("model_state", "module", "params", "net", "network", "student", "weights"),
)
# Prefixes of wrappers: DDP, torch.compile, `AveragedModel`.
WRAPPER_PREFIXES = ("module.", "_orig_mod.")
# torch/serialization.py: a file of torch before 1.6 starts with this number, then the version of its format.
LEGACY_MAGIC, LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
STORAGE_TYPES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
MAX_DIMENSIONS = 16


class ShardIndex(msgspec.Struct):
    """What Hugging Face writes next to weights in several files: the file of each tensor."""

    weight_map: dict[str, str]


class Ignored:
    """Stands for an object of a class that no state dict needs; takes whatever a pickle does to it."""

    is_module = False

    def __init__(self, *_: object, **__: object) -> None:
        """Take any arguments."""

    def __setstate__(self, state: object) -> None:
        """Take a state, and see whether it is that of an `nn.Module`."""
        self.is_module = isinstance(state, dict) and "_modules" in state

    def ignore(self, *_: object) -> None:
        """Take an entry of a dictionary, or items of a list or a set."""

    __setitem__ = append = extend = add = ignore


class WholeModel(ValueError):
    """For a file of `torch.save(model)`, which only the model's own code can read; the text is the model's key."""


class NamedEntries(dict[object, object]):
    """Stands for an ordered dictionary, without the attributes that `nn.Module.state_dict` gives it."""

    def __setstate__(self, _: object) -> None:
        """Take the attributes."""


@dataclass(frozen=True)
class StorageRef:
    """A named block of `count` values in the file."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class TensorRef:
    """A tensor in a block: what `torch.save` writes of it, before its values are read."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def rebuild_tensor(storage: object, offset: object, shape: object, stride: object, *_: object) -> TensorRef:
    """Return the tensor that a pickle describes; raises ValueError for one that exceeds its block."""
    if not (
        isinstance(shape, tuple)
        and isinstance(stride, tuple)
        and isinstance(storage, StorageRef)
        and isinstance(offset, int)
        and len(shape) == len(stride) <= MAX_DIMENSIONS
        and all(isinstance(number, int) and number >= 0 for number in (offset, *shape, *stride))
    ):
        raise ValueError("a tensor is described wrongly")
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if all(shape) else -1
    if offset + last >= storage.count or math.prod(shape) > storage.count:  # a stride of 0 repeats values
        raise ValueError("a tensor is larger than its values in the file")
    return TensorRef(storage, offset, shape, stride)


def rebuild_parameter(tensor: object, *_: object) -> object:
    """Return the tensor of a parameter."""
    return tensor


# Functions that a file may name. Each is replaced by one of this module that only describes a tensor.
KNOWN_GLOBALS: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): rebuild_parameter,
    ("collections", "OrderedDict"): NamedEntries,
}


class StateDictUnpickler(pickle.Unpickler):
    """Unpickles descriptions of tensors, and runs no code of the file's choice."""

    def __init__(self, file: io.BufferedIOBase | io.BytesIO) -> None:
        super().__init__(file, encoding="latin1")
        self.storages: dict[str, StorageRef] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a global name: one of `KNOWN_GLOBALS`, a type of values, or an idle class."""
        if module == "torch" and name in STORAGE_TYPES:
            return STORAGE_TYPES[name]
        return KNOWN_GLOBALS.get((module, name), Ignored)

    def persistent_load(self, pid: Any) -> object:
        """Return the block that a persistent id names; raises ValueError for another kind of id.

        Before torch 1.6, the id of a module's class was such a tuple too.
        """
        if isinstance(pid, tuple) and pid[:1] == ("module",):
            return Ignored
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == "storage" and isinstance(pid[1], torch.dtype)):
            raise ValueError("it holds values of an unknown kind, as quantized files do")
        key, count = str(pid[2]), pid[4]
        if not isinstance(count, int) or count < 0:
            raise ValueError("a block of values is described wrongly")
        found = StorageRef(key, pid[1], count)
        if self.storages.setdefault(key, found) != found:
            raise ValueError("a block of values is described twice")
        return found


def read_state_dict(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, without the prefixes of wrappers; raises `UserError`."""
    try:
        content = read_bytes(path)
        if path.name.endswith(INDEX_ENDING):
            return read_shards(path, msgspec.json.decode(content, type=ShardIndex).weight_map)
        # safetensors starts with a length and then JSON, which no pickle and no zip file does
        is_safetensors = content[8:9] == b"{" and not content.startswith(b"PK")
        found = dict(sorted(parse_safetensors(content).items())) if is_safetensors else read_pickled(content)
    except WholeModel as error:
        raise whole_model(path, str(error)) from None
    except OSError as error:
        raise unreadable(path, error.strerror or first_line(error)) from None
    except (
        *(ValueError, TypeError, AttributeError, LookupError, EOFError, OverflowError, RuntimeError),
        *(pickle.UnpicklingError, zipfile.BadZipFile, SafetensorError, NotImplementedError, struct.error),
        *(msgspec.MsgspecError, MemoryError),
    ) as error:
        kind = f"it holds {error.args[0]} values, as quantized files do" if isinstance(error, KeyError) else ""
        raise unreadable(path, kind or first_line(error) or type(error).__name__) from None
    return without_wrappers(found)


def read_shards(path: Path, files: Mapping[str, str]) -> dict[str, Tensor]:
    """Return the tensors of the files that an index names, which are in its folder."""
    state: dict[str, Tensor] = {}
    for name in sorted(set(files.values())):
        if Path(name).is_absolute() or ".." in Path(name).parts or not is_file(path.parent / name):
            raise UserError(
                f"TRAIN_WEIGHTS={printable(path)}: names {printable(name)}, which is not in its folder. Copy it there."
            )
        state |= read_state_dict(path.parent / name)
    return state


def unreadable(path: Path, cause: str) -> UserError:
    """Return the error for a file that is no state dict."""
    return UserError(
        f"TRAIN_WEIGHTS={printable(path)}: cannot be read as weights ({printable(cause)}). Give it a safetensors file"
        " or a state dict that torch.save wrote."
    )


def whole_model(path: Path, key: str) -> UserError:
    """Return the error for a file that holds a model with its code's names, and how to convert it."""
    model = "torch.load(sys.argv[1], weights_only=False)" + (key and f'["{key}"]')
    code = f"import sys, torch; torch.save({model}.state_dict(), sys.argv[2])"
    command = shlex.join(["python", "-c", code, str(path), str(path.with_name(f"{path.stem}-weights.pth"))])
    return UserError(
        f"TRAIN_WEIGHTS={printable(path)}: holds a whole model, and reading it would run its code. If you trust the"
        f" file, type `{one_line(command)}` where that code is, and name the new file."
    )


def read_pickled(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file that `torch.save` wrote, in the format before or since torch 1.6."""
    file = io.BytesIO(content)
    if not zipfile.is_zipfile(file):
        return read_legacy(content)
    with zipfile.ZipFile(file) as archive:
        names = {name.split("/", 1)[-1]: name for name in archive.namelist()}
        if "data.pkl" not in names:
            raise ValueError("it is a zip file without data.pkl")
        if "byteorder" in names and read_entry(archive, names["byteorder"]) != b"little":
            raise ValueError("its numbers are big-endian")
        unpickler = StateDictUnpickler(io.BytesIO(read_entry(archive, names["data.pkl"])))
        refs = find_weights(unpickler.load())
        blocks = {key: read_entry(archive, names[f"data/{key}"]) for key in {ref.storage.key for ref in refs.values()}}
    return materialize(refs, blocks)


def read_entry(archive: zipfile.ZipFile, name: str) -> bytes:
    """Return a file of an archive; raises ValueError for a compressed one, which could be of any size."""
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError("it is a compressed zip file, which torch does not write")
    return archive.read(name)


def read_legacy(content: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file of torch before 1.6: pickles one after the other, and then the blocks."""
    file = io.BytesIO(content)
    if StateDictUnpickler(file).load() != LEGACY_MAGIC or StateDictUnpickler(file).load() != LEGACY_VERSION:
        raise ValueError("it is not of torch.save")
    StateDictUnpickler(file).load()  # sizes of C types where it was written
    unpickler = StateDictUnpickler(file)
    refs = find_weights(unpickler.load())
    keys = StateDictUnpickler(file).load()
    if not isinstance(keys, list):
        raise ValueError("it has no list of blocks")
    blocks: dict[str, bytes] = {}
    for key in map(str, keys):
        (count,) = struct.unpack("<q", file.read(8))
        size = unpickler.storages[key].dtype.itemsize * unpickler.storages[key].count
        if count != unpickler.storages[key].count:
            raise ValueError("a block has another size than described")
        blocks[key] = file.read(size)
    return materialize(refs, blocks)


def find_weights(content: object) -> dict[str, TensorRef]:
    """Return the tensors of what a file holds: a state dict, or one below a usual key; raises ValueError."""
    found = content if isinstance(content, dict) else {None: content}
    below = (inner for key in WEIGHT_KEYS if isinstance(inner := found.get(key), dict))
    state = next((inner for inner in below if any(isinstance(one, TensorRef) for one in inner.values())), found)
    refs = {name: one for name, one in state.items() if isinstance(name, str) and isinstance(one, TensorRef)}
    if not refs:
        whole = [key for key in (None, *WEIGHT_KEYS) if getattr(found.get(key), "is_module", False)]
        raise (
            WholeModel(whole[0] or "")
            if whole
            else ValueError(f"it has no tensors by name, also not below {', '.join(WEIGHT_KEYS)}")
        )
    return refs


def materialize(refs: Mapping[str, TensorRef], blocks: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return the tensors with their values; raises ValueError for a block that is too short.

    `rebuild_tensor` has checked that each lies within its block.
    """
    flat: dict[str, Tensor] = {}
    for ref in refs.values():
        storage = ref.storage
        if storage.key in flat:
            continue
        content = blocks[storage.key]
        if len(content) != storage.count * storage.dtype.itemsize:
            raise ValueError("it was cut short")
        flat[storage.key] = (
            torch.frombuffer(bytearray(content), dtype=storage.dtype)
            if content
            else torch.empty(0, dtype=storage.dtype)
        )
    return {
        name: flat[ref.storage.key].as_strided(ref.shape, ref.stride, ref.offset).clone() for name, ref in refs.items()
    }


def without_wrappers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state without the prefixes that wrappers add, outer ones first, and without their own tensors.

    All names have a prefix but `AveragedModel`'s counter.
    """
    while state and (
        prefix := next(
            (one for one in WRAPPER_PREFIXES if all(n.startswith(one) for n in state if n != "n_averaged")), ""
        )
    ):
        state = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return dict(state)
