"""Convolutions of images of a few pixels as matrix products, which CPUs compute several times as fast.

Deep networks see such images in their last layers: of an image of 32x32 pixels ResNet leaves 2x2 and then one. Each
pixel that comes out then hangs on all that went in, so that the convolution is a product with a matrix of its filters'
taps, while oneDNN multiplies with every tap, those beyond the image's edge too, and repacks them all for each step.
Measured on two cores, a batch of 128, forward and backward: 3.4 ms for 11 with 256 channels of 2x2 pixels, 1.3 for 7.5
with 512 of one pixel, less than half of either in bf16; a whole step of ResNet-18 takes two thirds of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from train.models.inspection import dry_run

# Of 3x3 pixels a product was no faster, of 4x4 half as fast; of 2x2 with 64 channels as fast as a convolution.
MAX_PIXELS = 4
MIN_CHANNELS = 64


class SmallConv2d(nn.Conv2d):
    """A convolution that computes images of up to four pixels as a matrix product, and others as ever."""

    @classmethod
    def sharing(cls, module: nn.Conv2d) -> SmallConv2d:
        """Return one with the parameters of a plain convolution."""
        return share_parameters(cls, module)

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        height, width = input.shape[2:]
        if height * width > MAX_PIXELS:
            convolved: Tensor = super()._conv_forward(input, weight, bias)
            return convolved
        images = input.permute(0, 2, 3, 1)
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            seen = images[:, :: self.stride[0], :: self.stride[1]]
            return linear(seen, weight.flatten(1), bias).permute(0, 3, 1, 2)
        rows, columns = (
            tap_table(size, *along)
            for size, *along in zip((height, width), self.kernel_size, self.stride, padding_2d(self), strict=True)
        )
        matrix: Tensor = ConvAsMatrix.apply(weight, rows, columns)  # type: ignore[no-untyped-call]
        biases = None if bias is None else bias.repeat(len(rows) * len(columns))
        out = linear(images.flatten(1), matrix, biases)
        return out.view(len(input), len(rows), len(columns), -1).permute(0, 3, 1, 2)


def use_matmul_for_small_inputs(model: nn.Module, shape: tuple[int, int, int], *, by_taps: bool = True) -> nn.Module:
    """Return the model with the convolutions that see small images changed so, for images of a (C, H, W) shape.

    Filters of more than one tap lie tap by tap, which makes their matrices blocks of memory, a third of the time;
    `by_taps` is to be off for who wants to see them as a matrix themselves.
    """
    pixels: dict[nn.Conv2d, int] = {}

    def look(module: nn.Conv2d, inputs: tuple[Tensor]) -> None:
        pixels[module] = max(pixels.get(module, 0), inputs[0].shape[2:].numel())

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if is_eligible(module)]
    if not hooks:
        return model
    dry_run(model, shape)
    for hook in hooks:
        hook.remove()
    small = {module: SmallConv2d.sharing(module) for module, most in pixels.items() if most <= MAX_PIXELS}
    for module in small.values():
        order = (2, 3, 0, 1) if by_taps and module.kernel_size != (1, 1) else (0, 1, 2, 3)
        sizes = [module.weight.shape[axis] for axis in order]
        # Filters of one tap lie alike in either order; their gradients come with the strides of this one.
        laid = module.weight.data.new_empty(sizes).permute(order)
        module.weight.data = laid.copy_(module.weight.data)
    return replace_modules(model, small)


def replace_modules(model: nn.Module, replacements: Mapping[Any, nn.Module]) -> nn.Module:
    """Return the model with these modules replaced, wherever they stand in it."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])
    return replacements.get(model, model)


@contextmanager
def original_convolutions(model: nn.Module) -> Iterator[None]:
    """Have the model's convolutions be plain ones within: for who counts what they compute, or writes them down."""
    plain = {
        module: share_parameters(nn.Conv2d, module) for module in model.modules() if isinstance(module, SmallConv2d)
    }
    replace_modules(model, plain)
    try:
        yield
    finally:
        replace_modules(model, {new: old for old, new in plain.items()})


Convolution = TypeVar("Convolution", bound=nn.Conv2d)


def share_parameters(kind: type[Convolution], module: nn.Conv2d) -> Convolution:
    """Return a convolution of another kind with the settings and the very parameters of a module."""
    with torch.device("meta"):
        made = kind(
            module.in_channels,
            module.out_channels,
            module.kernel_size,  # type: ignore[arg-type]
            module.stride,  # type: ignore[arg-type]
            module.padding,  # type: ignore[arg-type]
            bias=module.bias is not None,
        )
    made.weight, made.bias = module.weight, module.bias
    return made.train(module.training)


def is_eligible(module: nn.Module) -> bool:
    """Tell whether a module is a convolution that could be a product with one matrix, and large enough to gain."""
    return (
        type(module) is nn.Conv2d
        and (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
        and not isinstance(module.padding, str)
        and min(module.in_channels, module.out_channels) >= MIN_CHANNELS
    )


TapTable = tuple[tuple[int, ...], ...]


def tap_table(size: int, taps: int, stride: int, padding: int) -> TapTable:
    """Return along one axis, for each pixel that comes out and each that goes in, the tap between them, or -1."""
    count = (size + 2 * padding - taps) // stride + 1
    between = ((at - (out * stride - padding) for at in range(size)) for out in range(count))
    return tuple(tuple(tap if 0 <= tap < taps else -1 for tap in line) for line in between)


class ConvAsMatrix(torch.autograd.Function):
    """The matrix by which all channels of all pixels that go in make all of all that come out."""

    @staticmethod
    def forward(ctx: Any, filters: Tensor, rows: TapTable, columns: TapTable) -> Tensor:
        """Return it, (height · width · channels that come out) x (height · width · channels that go in)."""
        ctx.save_for_backward(filters)
        outputs, inputs = filters.shape[:2]
        sizes = len(rows), len(columns), outputs, len(rows[0]), len(columns[0]), inputs
        has_gaps = any(-1 in line for line in (*rows, *columns))
        matrix = filters.new_zeros(sizes) if has_gaps else filters.new_empty(sizes)
        ctx.rows, ctx.columns, ctx.shape = rows, columns, matrix.shape
        by_tap = filters.permute(2, 3, 0, 1)
        for (a, b, c, d), tap in iter_taps(rows, columns):
            matrix[a, b, :, c, d] = by_tap[tap]
        return matrix.flatten(3).flatten(0, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of the filters, laid out as they are; taps that nothing passes through have zeros."""
        (filters,) = ctx.saved_tensors
        parts = gradient.view(ctx.shape)
        change = torch.zeros_like(filters)
        by_tap = change.permute(2, 3, 0, 1)
        for (a, b, c, d), tap in iter_taps(ctx.rows, ctx.columns):
            by_tap[tap] += parts[a, b, :, c, d]
        return change, None, None


def iter_taps(rows: TapTable, columns: TapTable) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int]]]:
    """Yield, for each pixel that comes out and each that goes in, where they are and which tap is between them."""
    for a, b in product(range(len(rows)), range(len(columns))):
        for c, d in product(range(len(rows[0])), range(len(columns[0]))):
            tap = rows[a][c], columns[b][d]
            if min(tap) >= 0:
                yield (a, b, c, d), tap


def padding_2d(module: nn.Conv2d) -> tuple[int, int]:
    """Return how many zeros a convolution sees beyond each edge."""
    assert not isinstance(module.padding, str)
    height, width = module.padding
    return height, width
