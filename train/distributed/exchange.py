"""Exchanges values between ranks as msgpack and safetensors: what another rank sends can run no code.

torch's content collectives for objects send pickles (torch.distributed, `all_gather_object`: "known to be insecure").
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from entrypoint.core.errors import ExitCode, UserError
from train.checkpoint.tensor_files import without_shared_memory

T = TypeVar("T")


def encode(value: object) -> Tensor:
    """Return a value's bytes, (N,) uint8: the length of its msgpack, the msgpack, and its tensors as safetensors."""
    tensors: dict[str, Tensor] = {}

    def reduce(part: Any) -> Any:
        if isinstance(part, Tensor):
            tensors[str(len(tensors))] = part.detach().cpu().contiguous()
            return len(tensors) - 1
        if isinstance(part, UserError):
            return [str(part), int(part.code)]
        if isinstance(part, Path):
            return str(part)
        raise NotImplementedError(f"{type(part).__name__} cannot be sent to other ranks")

    text = msgspec.msgpack.encode(value, enc_hook=reduce)
    whole = len(text).to_bytes(8, "little") + text + save(without_shared_memory(tensors))
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def decode(data: Tensor, kind: Any) -> Any:
    """Return the value of these bytes as a `kind`; raises `UserError` if another rank has sent something else."""
    content = data.numpy().tobytes()
    end = 8 + int.from_bytes(content[:8], "little")
    try:
        tensors = load(content[end:])

        def rebuild(wanted: type, part: Any) -> Any:
            if wanted is Tensor:
                return tensors[str(part)]
            return UserError(str(part[0]), ExitCode(part[1])) if wanted is UserError else Path(part)

        return msgspec.msgpack.decode(content[8:end], type=kind, dec_hook=rebuild)
    except (msgspec.MsgspecError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"another rank sent what is not of this job ({error}). Use the same image on all nodes.",
            ExitCode.RENDEZVOUS,
        ) from None


def all_gather_values(value: T, kind: Any, group: dist.ProcessGroup | None = None) -> list[T]:
    """Return every rank's value, in order of rank, on every rank; `group` is one of Gloo."""
    content = encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)]), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(parts, torch.cat([content, content.new_zeros(longest - len(content))]), group=group)
    return [decode(part[: int(size)], kind) for part, size in zip(parts, sizes, strict=True)]


def broadcast_value(value: T | None, kind: Any, group: dist.ProcessGroup | None = None) -> T:
    """Return rank 0's value on every rank; the value of another rank is not looked at."""
    is_main = dist.get_rank(group) == 0
    content = encode(value) if is_main else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(content)])
    dist.broadcast(size, 0, group=group)
    if not is_main:
        content = torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(content, 0, group=group)
    return cast("T", value if is_main else decode(content, kind))
