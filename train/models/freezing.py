"""Layers that keep their weights: TRAIN_FREEZE."""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from entrypoint.core.errors import UserError, did_you_mean, printable, refuse_if
from train.models.inspection import count_parameters, in_modules
from train.setting_groups.network import BACKBONE, STATISTICS


def freeze(model: nn.Module, text: str, head: tuple[str, ...]) -> int:
    """Freeze the layers that TRAIN_FREEZE names; return the number of parameters that stay trainable.

    `head` names the modules of the head.

    A BatchNorm layer without trainable parameters keeps its statistics too, and with `statistics` all do. Raises
    `UserError` for a name that no parameter has, and if nothing is left to train.
    """
    if not text:
        return count_parameters(model)
    wanted = layers_to_freeze(model, text, head)
    for name, parameter in model.named_parameters():
        is_backbone = BACKBONE in wanted and not in_modules(name, head)
        if is_backbone or any(is_inside(name, part) for part in wanted):
            parameter.requires_grad = False
    trainable = count_parameters(model)
    if not trainable:
        raise UserError(f"TRAIN_FREEZE={printable(text)}: leaves nothing to train. Freeze fewer layers.")
    for module in model.modules():
        learns = [parameter.requires_grad for parameter in module.parameters(recurse=False)]
        if isinstance(module, _BatchNorm) and (STATISTICS in wanted or (learns and not any(learns))):
            module.eval()
            module.train = MethodType(lambda layer, *_: layer, module)  # type: ignore[method-assign]
    return trainable


def layers_to_freeze(model: nn.Module, text: str, head: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names in TRAIN_FREEZE; raises `UserError` for one that no layer has."""
    source = f"TRAIN_FREEZE={printable(text)}"
    names = [name for name, _ in model.named_parameters()]
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    refuse_if(
        {
            f"{source}: names no layer. Name layers, or `backbone`.": not wanted,
            f"{source}: no last layer with an output for each class was found. Name the layers, with commas.": (
                wanted == (BACKBONE,) and not head
            ),
        }
    )
    for part in wanted:
        if part not in (BACKBONE, STATISTICS) and not any(is_inside(name, part) for name in names):
            hint = did_you_mean(part, sorted({name.rpartition(".")[0] for name in names}))
            raise UserError(f"{source}: no layer is called {printable(part)}. {hint}Name layers, or `backbone`.")
    return wanted


def is_inside(parameter: str, layer: str) -> bool:
    """Return whether a parameter is a layer's, or is called so itself."""
    return parameter == layer or parameter.startswith(f"{layer}.")
