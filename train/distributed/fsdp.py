"""A model spread over the ranks (FSDP2): each holds a part of weights, gradients and optimizer state.

A unit's weights are gathered from all ranks just before they are used and dropped after it, so every forward pass, also
one of an evaluation, is one that all ranks take part in. Only runs that are sharded import this: it takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from train.distributed.process_group import ProcessGroup

# Fewer parameters than these are not worth an exchange of their own: they travel with what encloses them.
MIN_UNIT_PARAMETERS = 500_000


def apply_fsdp(model: nn.Module, group: ProcessGroup) -> None:
    """Spread a model that lies on the CPU over the ranks' devices, a unit at a time.

    What fits no single device never lies on one: a unit is moved there, cut, and only this rank's part stays.
    Gradients are added up over the ranks. FSDP2's mean is none over Gloo, which takes it for a sum (torch 2.8).
    """
    mesh = init_device_mesh(group.device.type, (group.world_size,))
    for unit in [*iter_fsdp_units(model), model]:
        spread_unit = fully_shard(unit, mesh=mesh)
        spread_unit.set_force_sum_reduction_for_comms(True)
        spread_unit.set_gradient_divide_factor(1.0)


def iter_fsdp_units(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the model's blocks, inner ones first: large elements of its sequences, which are always called whole.

    Other modules may be used by their weights alone (attention's output projection is), which gathers nothing. FSDP2
    takes no containers, not even those that can be called, as DenseNet's blocks can.
    """
    for child in model.children():
        yield from iter_fsdp_units(child)
        called = isinstance(model, nn.Sequential) and not isinstance(child, (nn.ModuleDict, nn.ModuleList))
        if called and sum(one.numel() for one in child.parameters()) >= MIN_UNIT_PARAMETERS:
            yield child


def full_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """Return a sharded model's full state on the CPU, only on rank 0; all ranks must call this."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Tensor] = get_model_state_dict(model, options=options)  # type: ignore[assignment]
    return state
