"""What all faster convolutions share: how a plain one becomes one of them, and what they leave to torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

import torch
from torch import Tensor, nn


class FasterConv2d(nn.Conv2d):
    """A convolution that computes some images in another way than torch.

    A plain convolution becomes one by its class alone (`module.__class__`). So what a user has attached to it stays:
    hooks, buffers, other attributes, a forward of its own. Settings and parameters may change later.
    """

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if is_ordinary(input, weight, bias) and has_shapes(self, input, weight, bias):
            computed = self.compute(input, weight, bias)
            if computed is not None:
                return computed
        convolved: Tensor = super()._conv_forward(input, weight, bias)
        return convolved

    def compute(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the convolution of (N, C, H, W) images, None to leave them to torch."""
        raise NotImplementedError


def is_ordinary(*tensors: Tensor | None) -> bool:
    """Return whether all are tensors of torch itself, and nothing observes or changes what is done with them.

    Counters of operations, fake tensors, `torch.func` and tracers know torch's own convolution only.
    """
    if torch.compiler.is_compiling():
        return True
    return (
        all(one is None or (type(one) in (Tensor, nn.Parameter) and not one.is_neg()) for one in tensors)
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()  # noqa: SLF001  # torch has no public question for it
        and not torch._C._len_torch_dispatch_stack()  # noqa: SLF001  # nor for this
    )


def has_shapes(module: nn.Conv2d, images: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these tensors have the shapes that the module's settings say; torch accepts others too."""
    outputs, inputs = module.out_channels, module.in_channels
    return (
        images.dim() == 4
        and images.shape[1] == inputs
        and weight.shape == (outputs, inputs, *module.kernel_size)
        and (bias is None or bias.shape == (outputs,))
    )


def is_plain(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a module is torch's own convolution in one group, with a parameter of the usual shape."""
    return (
        type(module) is nn.Conv2d
        and isinstance(getattr(module, "weight", None), nn.Parameter)
        and module.weight.shape == (module.out_channels, module.in_channels, *module.kernel_size)
    )


@contextmanager
def original_convolutions(model: nn.Module) -> Iterator[None]:
    """Restore the model's plain convolutions temporarily, to count operations or to export the model."""
    kinds: dict[nn.Module, type[nn.Conv2d]] = {
        module: type(module) for module in model.modules() if isinstance(module, FasterConv2d)
    }
    for module in kinds:
        module.__class__ = nn.Conv2d
    try:
        yield
    finally:
        for module, kind in kinds.items():
            module.__class__ = kind
