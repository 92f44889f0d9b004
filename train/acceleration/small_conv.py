"""Replaces convolutions of images of at most four pixels by matrix products, which CPUs compute faster.

Deep networks have such images in their last layers: ResNet reduces 32x32 pixels to 2x2 and then to one.
There each output pixel depends on all input pixels, so a convolution is a product with one matrix of filter taps.
Why it is faster: oneDNN multiplies with every tap, also beyond the image's edge, and repacks all taps at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from train.acceleration.faster_conv import FasterConv2d, is_plain
from train.models.inspection import dry_run

# A matrix product is faster up to 2x2 pixels, and with more than 64 channels. With 64 channels it is as fast.
MAX_PIXELS = 4
MIN_CHANNELS = 64


class SmallConv2d(FasterConv2d):
    """A convolution that computes images of up to four pixels as a matrix product, and larger ones as usual."""

    def compute(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the convolution, None for larger images."""
        height, width = images.shape[2:]
        if height * width > MAX_PIXELS or not has_settings(self):
            return None
        images = images.permute(0, 2, 3, 1)
        if self.kernel_size == (1, 1) and self.padding == (0, 0):
            strided = images[:, :: self.stride[0], :: self.stride[1]]
            return linear(strided, weight.flatten(1), bias).permute(0, 3, 1, 2)
        assert isinstance(self.padding, tuple), "has_settings says so"
        rows, columns = (
            tap_table(size, *along)
            for size, *along in zip((height, width), self.kernel_size, self.stride, self.padding, strict=True)
        )
        matrix: Tensor = ConvAsMatrix.apply(weight, rows, columns)
        biases = None if bias is None else bias.repeat(len(rows) * len(columns))
        out = linear(images.flatten(1), matrix, biases)
        return out.view(len(images), len(rows), len(columns), -1).permute(0, 3, 1, 2)


def use_matmul_for_small_inputs(model: nn.Module, shape: tuple[int, int, int]) -> nn.Module:
    """Return the model with matrix products for convolutions of small images, for inputs of a (C, H, W) shape.

    Filters with several taps are stored tap by tap. Why: each block of their matrix is contiguous then.
    """
    pixels: dict[nn.Conv2d, int] = {}

    def record_pixels(module: nn.Conv2d, inputs: tuple[Tensor, ...], named: dict[str, Tensor]) -> None:
        images = (*inputs, *named.values())[0]
        pixels[module] = max(pixels.get(module, 0), images.shape[-2:].numel())

    hooks = [
        module.register_forward_pre_hook(record_pixels, with_kwargs=True)
        for module in model.modules()
        if is_plain(module) and has_settings(module) and min(module.in_channels, module.out_channels) >= MIN_CHANNELS
    ]
    if not hooks:
        return model
    dry_run(model, shape)
    for hook in hooks:
        hook.remove()
    for module in (module for module, most in pixels.items() if most <= MAX_PIXELS):
        order = (2, 3, 0, 1) if module.kernel_size != (1, 1) else (0, 1, 2, 3)
        sizes = [module.weight.shape[axis] for axis in order]
        # Filters with one tap are contiguous in either order. Their gradients have the strides of this order.
        stored = module.weight.data.new_empty(sizes).permute(order)
        module.weight.data = stored.copy_(module.weight.data)
        module.__class__ = SmallConv2d
    return model


def has_settings(module: nn.Conv2d) -> bool:
    """Return whether one matrix can replace a convolution of these settings; a user may change them at any time."""
    return (
        (module.groups, module.dilation, module.padding_mode) == (1, (1, 1), "zeros")
        and isinstance(module.padding, tuple)
        and isinstance(module.stride, tuple)
    )


TapTable = tuple[tuple[int, ...], ...]


def tap_table(size: int, taps: int, stride: int, padding: int) -> TapTable:
    """Return along one axis, for each output and each input pixel, the tap between them, or -1."""
    count = (size + 2 * padding - taps) // stride + 1
    between = ((at - (out * stride - padding) for at in range(size)) for out in range(count))
    return tuple(tuple(tap if 0 <= tap < taps else -1 for tap in line) for line in between)


class ConvAsMatrix(torch.autograd.Function):
    """The matrix that maps all channels of all input pixels to all channels of all output pixels."""

    @staticmethod
    def forward(ctx: Any, filters: Tensor, rows: TapTable, columns: TapTable) -> Tensor:
        """Return the matrix, (output height · width · channels) x (input height · width · channels)."""
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
        """Return the gradient of the filters in their memory format; unused taps have zeros."""
        (filters,) = ctx.saved_tensors
        parts = gradient.view(ctx.shape)
        change = torch.zeros_like(filters)
        by_tap = change.permute(2, 3, 0, 1)
        for (a, b, c, d), tap in iter_taps(ctx.rows, ctx.columns):
            by_tap[tap] += parts[a, b, :, c, d]
        return change, None, None


def iter_taps(rows: TapTable, columns: TapTable) -> Iterator[tuple[tuple[int, int, int, int], tuple[int, int]]]:
    """Yield (output row, output column, input row, input column) and the tap between them, for all pairs of pixels."""
    for a, b in product(range(len(rows)), range(len(columns))):
        for c, d in product(range(len(rows[0])), range(len(columns[0]))):
            tap = rows[a][c], columns[b][d]
            if min(tap) >= 0:
                yield (a, b, c, d), tap
