"""Wrap models in DistributedDataParallel by the settings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from train.distributed.process_group import ProcessGroup
from train.distributed.shared_memory import SharedMemoryGroup
from train.setting_groups.compute import ComputeSettings


def wrap_ddp(model: nn.Module, settings: ComputeSettings, group: ProcessGroup) -> nn.Module:
    """Return the model wrapped by DDP; with one rank, or sharded, it is returned unchanged."""
    if group.world_size == 1 or is_sharded(model):
        return model
    ddp_model = DistributedDataParallel(
        model,
        device_ids=[group.device] if group.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.ddp_find_unused_parameters,
    )
    if group.memory:
        # A lambda, because DDP checks the annotations of a hook and rejects strings.
        ddp_model.register_comm_hook(group.memory, lambda memory, bucket: shared_memory_hook(memory, bucket.buffer()))
    return ddp_model


def shared_memory_hook(memory: SharedMemoryGroup, gradients: Tensor) -> torch.futures.Future[Tensor]:
    """Average a bucket of float32 gradients through shared memory, before the backward pass continues.

    Why not at the same time: the average and the backward pass need the same cores.
    """
    memory.mean(gradients)
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


def is_sharded(model: nn.Module) -> bool:
    """Return whether the model is sharded, without the slow import of FSDP's class."""
    return hasattr(model, "set_requires_gradient_sync")


def no_sync_until_last(model: Any, *, last: bool) -> AbstractContextManager[None]:
    """Skip gradient synchronization until the last micro-batch of a step."""
    if is_sharded(model):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        no_sync: AbstractContextManager[None] = model.no_sync()
        return no_sync
    return nullcontext()


def iter_local_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and this rank's shard of each parameter."""
    for name, parameter in model.named_parameters():
        part = parameter.detach()
        yield name, part.to_local() if is_sharded(model) else part  # type: ignore[attr-defined]


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's full state; a sharded one returns it on rank 0 only, and all ranks must call this."""
    if not is_sharded(model):
        return dict(model.state_dict())
    # The import is slow.
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Tensor] = get_model_state_dict(model, options=options)  # type: ignore[assignment]
    return state
