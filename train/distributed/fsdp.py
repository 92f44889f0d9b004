"""Models sharded over the ranks (FSDP2): each rank holds a shard of weights, gradients and optimizer state.

A unit's weights are gathered from all ranks before their use, and freed after it.
So all ranks must take part in every forward pass, also in evaluation.
Only sharded runs import this module, because the import is slow.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from train.distributed.process_group import ProcessGroup

# Modules with fewer parameters get no collective of their own; they belong to the enclosing unit.
MIN_UNIT_PARAMETERS = 500_000


def apply_fsdp(model: nn.Module, group: ProcessGroup) -> None:
    """Shard a model on the CPU over the ranks' devices, one unit at a time.

    Why one at a time: a model that fits no single device is never on one device as a whole.
    Gradients are summed over the ranks. Why not averaged: over Gloo, FSDP2 sums instead of averaging (torch 2.8).
    """
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    for unit in [*iter_fsdp_units(model), model]:
        sharded_unit = fully_shard(unit, mesh=mesh)
        sharded_unit.set_force_sum_reduction_for_comms(True)
        sharded_unit.set_gradient_divide_factor(1.0)


def iter_fsdp_units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's units, inner ones first: large modules of nn.Sequential, whose forward is always called.

    Other modules may be used by their weights alone, such as attention's output projection. FSDP2 gathers nothing then.
    FSDP2 accepts no containers, not even callable ones such as DenseNet's blocks.
    """
    for child in model.children():
        yield from iter_fsdp_units(child)
        called = isinstance(model, nn.Sequential) and not isinstance(child, (nn.ModuleDict, nn.ModuleList))
        if called and sum(parameter.numel() for parameter in child.parameters()) >= MIN_UNIT_PARAMETERS:
            yield child
