"""What all replacements of a convolution share: they keep the parameters, and can be undone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self, TypeVar

import torch
from torch import nn

Convolution = TypeVar("Convolution", bound=nn.Conv2d)


class FasterConv2d(nn.Conv2d):
    """A convolution that computes some images in another way than torch."""

    @classmethod
    def sharing(cls, module: nn.Conv2d) -> Self:
        """Return such a convolution with the parameters of a plain one."""
        return share_parameters(cls, module)


def replace_modules(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> nn.Module:
    """Return the model with these modules replaced at every place in it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return replacements.get(model, model)


@contextmanager
def original_convolutions(model: nn.Module) -> Iterator[None]:
    """Restore the model's plain convolutions temporarily, to count operations or to export the model."""
    plain = {
        module: share_parameters(nn.Conv2d, module) for module in model.modules() if isinstance(module, FasterConv2d)
    }
    replace_modules(model, plain)
    try:
        yield
    finally:
        replace_modules(model, {new: old for old, new in plain.items()})


def share_parameters(kind: type[Convolution], module: nn.Conv2d) -> Convolution:
    """Return a convolution of another class that shares the settings and the parameters of a module."""
    with torch.device("meta"):
        shared = kind(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            bias=module.bias is not None,
        )
    shared.weight, shared.bias = module.weight, module.bias
    return shared.train(module.training)
