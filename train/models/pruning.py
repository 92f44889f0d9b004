"""Structured pruning by L1 norm: the filters of convolutions with the smallest weights are removed.

Only a state dict leaves this module, nothing else of the pruning library.
`resize_to_state` shrinks a model of the same definition to that state, on other ranks and after a resume.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from entrypoint.core.errors import ExitCode, UserError, did_you_mean, first_line
from train.models.registry import restore_state_metadata
from train.setting_groups.network import NetworkSettings
from train.settings import ImageShape

# Layers whose outputs could be removed; only those of convolutions are.
LAYER_TYPES = (nn.Conv2d, nn.Linear)


def prune_state(
    model: nn.Module, state: Mapping[str, Tensor], shape: ImageShape, settings: NetworkSettings
) -> dict[str, Tensor]:
    """Return the state of the pruned model; `model` cannot be used afterwards.

    Raises `UserError` if the library cannot prune this model, or if the pruned model does not run.
    """
    model.load_state_dict(restore_state_metadata(model, state))
    model.eval()
    names = layers_to_prune(model, settings)
    example = torch.zeros(2, *shape)
    try:
        with silence_library():
            pruned = prune(model, names, example, settings.prune_ratio)
            with torch.no_grad():
                pruned(example)
    except Exception as error:  # the library raises any error of its tracing
        raise UserError(
            f"TRAIN_PRUNE_RATIO={settings.prune_ratio}: {settings.model} cannot be pruned ({first_line(error)})."
            " Name layers to leave alone with TRAIN_PRUNE_EXCLUDE.",
            ExitCode.MACHINE,
        ) from None
    if same_shapes(pruned, state):
        raise UserError(
            f"TRAIN_PRUNE_RATIO={settings.prune_ratio}: removes nothing of {settings.model}, or would leave no filter"
            " of a layer. Choose another ratio.",
            ExitCode.MACHINE,
        )
    result: dict[str, Tensor] = {name: value.detach().clone() for name, value in pruned.state_dict().items()}
    return result


def layers_to_prune(model: nn.Module, settings: NetworkSettings) -> list[str]:
    """Return the layers that lose outputs: convolutions, except excluded ones and the last layer.

    Raises `UserError` if an excluded name is not in the model, or if no layer remains.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LAYER_TYPES)}
    excluded = settings.prune_exclude.split(",") if settings.prune_exclude else []
    matches = {name: {layer for layer in layers if f"{layer}.".startswith(f"{name}.")} for name in excluded}
    for name in excluded:
        if not matches[name]:
            raise UserError(
                f"TRAIN_PRUNE_EXCLUDE={name}: {settings.model} has no such layer."
                f" {did_you_mean(name, layers)}It has {', '.join(list(layers)[:8])}, …"
            )
    protected = {list(layers)[-1]}.union(*matches.values())
    names = [name for name, module in layers.items() if isinstance(module, nn.Conv2d) and name not in protected]
    if not names:
        raise UserError(
            f"TRAIN_PRUNE_RATIO={settings.prune_ratio}: {settings.model} has no convolution left to prune."
            " Unset it, or exclude fewer layers."
        )
    return names


def prune(model: nn.Module, names: list[str], example: Tensor, ratio: float) -> nn.Module:
    """Prune with Torch-Pruning, which removes dependent channels of several layers together (arXiv:2301.12900)."""
    import torch_pruning

    others = [module for name, module in model.named_modules() if isinstance(module, LAYER_TYPES)
              and name not in names]  # fmt: skip
    pruner = torch_pruning.pruner.BasePruner(
        model,
        example,
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=1),
        pruning_ratio=ratio,
        ignored_layers=others,
    )
    pruner.step()
    return model


@contextlib.contextmanager
def silence_library() -> Iterator[None]:
    """Suppress the messages that the library prints for every layer."""
    logging.disable(logging.CRITICAL)  # what is an error is raised too
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def same_shapes(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Return whether a state has the shapes of this model, so is not of a pruned one."""
    return all(value.shape == state[name].shape for name, value in model.state_dict().items() if name in state)


def resize_to_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Shrink every layer to the sizes of a pruned model's state, and load its values."""
    for prefix, module in model.named_modules():
        parameters = {name for name, _ in module.named_parameters(recurse=False)}
        for name in (*parameters, *(name for name, _ in module.named_buffers(recurse=False))):
            new = state.get(f"{prefix}.{name}" if prefix else name)
            if new is not None:
                setattr(module, name, nn.Parameter(new.clone()) if name in parameters else new.clone())
        update_layer_sizes(module)


def update_layer_sizes(module: Any) -> None:
    """Set the size attributes of a layer to the shape of its weights."""
    if isinstance(module, _ConvNd):
        outputs, inputs = module.weight.shape[:2]
        if module.groups > 1 and inputs == 1:  # depthwise
            module.groups = outputs
        module.out_channels, module.in_channels = outputs, inputs * module.groups
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _BatchNorm) and module.running_mean is not None:
        module.num_features = len(module.running_mean)
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)
