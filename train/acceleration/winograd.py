"""Replaces 3x3 convolutions on CPUs by Winograd's algorithm, which needs 2 to 4 times fewer multiplications.

Lavin and Gray, 2015 (arXiv:1509.09308), F(4x4, 3x3): 36 multiplications for 4x4 output pixels instead of 144.
oneDNN has no such kernel for x86 CPUs. Sums round differently, by up to 3e-4 of their standard deviation.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from entrypoint.core.errors import ExitCode, UserError
from train.acceleration.faster_conv import FasterConv2d, replace_modules
from train.acceleration.winograd_kernel import CHANNEL_MULTIPLE, WinogradKernel, winograd_kernel

TILE = 4
# Multiplications for one output pixel and one pair of channels: 9 direct ones, 36 for a tile.
DIRECT, PER_TILE = 9, 36
# Images whose last tiles are mostly empty gain less. Fewer channels cost more to transform than they save.
MIN_SAVING = 2.0
MIN_CHANNELS = 16
# Tiles of a thread. Each thread has its own sums of the filters' gradients, and adding them takes time as well.
MIN_TILES = 128
# Transformed filters beyond it fall out of the cache, and then nothing is gained.
MAX_FILTERS = 256 * 256


class WinogradConv2d(FasterConv2d):
    """A 3x3 convolution that uses Winograd's algorithm where that is faster: in fp32, with enough images and pixels."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not is_faster(input) or weight.dtype != torch.float32 or torch.is_autocast_enabled("cpu"):
            convolved: Tensor = super()._conv_forward(input, weight, bias)
            return convolved
        result: Tensor = WinogradConvolution.apply(input, weight)  # type: ignore[no-untyped-call]
        return result if bias is None else result + bias.view(1, -1, 1, 1)


class WinogradConvolution(torch.autograd.Function):
    """A 3x3 convolution with a border of one zero, in float32 and channels_last."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, filters: Tensor) -> Tensor:
        """Return the convolution of (N, C, H, W) images by (K, C, 3, 3) filters, in channels_last."""
        images = images.contiguous(memory_format=torch.channels_last)
        filters = dense(filters)
        ctx.save_for_backward(images, filters)
        count, _, height, width = images.shape
        result = images.new_empty((count, height, width, len(filters))).permute(0, 3, 1, 2)
        kernel().forward(
            sizes(images, filters), images.data_ptr(), filters.data_ptr(), filters.stride(), result.data_ptr(),
            torch.get_num_threads(),
        )  # fmt: skip
        return result

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of images and filters, where they are needed."""
        images, filters = ctx.saved_tensors
        gradient = gradient.contiguous(memory_format=torch.channels_last)
        results = [
            torch.empty_like(one) if needed else None
            for one, needed in zip((images, filters), ctx.needs_input_grad, strict=True)
        ]
        first, second = (None if one is None else one.data_ptr() for one in results)
        kernel().backward(
            sizes(images, filters), images.data_ptr(), filters.data_ptr(), filters.stride(), gradient.data_ptr(),
            (first, second), torch.get_num_threads(),
        )  # fmt: skip
        return results[0], results[1]


def dense(filters: Tensor) -> Tensor:
    """Return filters whose gradient can have their strides: a copy of those that overlap or have gaps."""
    return filters if torch.empty_like(filters).stride() == filters.stride() else filters.clone()


def kernel() -> WinogradKernel:
    """Return the compiled functions, which `use_winograd` has found."""
    found = winograd_kernel()
    assert found
    return found


def sizes(images: Tensor, filters: Tensor) -> tuple[int, ...]:
    """Return (images, height, width, input channels, output channels)."""
    count, channels, height, width = images.shape
    return count, height, width, channels, len(filters)


def use_winograd(model: nn.Module) -> nn.Module:
    """Return the model with Winograd's algorithm where it suits; raises `UserError` where it cannot be loaded."""
    if not winograd_kernel():
        raise UserError(
            "TRAIN_WINOGRAD: the compiled kernel cannot be loaded, or torch has no OpenMP. Set TRAIN_WINOGRAD=off.",
            ExitCode.MACHINE,
        )
    suited = {module: WinogradConv2d.sharing(module) for module in model.modules() if is_suited(module)}
    return replace_modules(model, suited)


def is_suited(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a module is a convolution that the algorithm can compute, with channels for which it is faster."""
    return (
        type(module) is nn.Conv2d
        and (module.kernel_size, module.stride, module.dilation) == ((3, 3), (1, 1), (1, 1))
        and (module.padding, module.padding_mode, module.groups) == ((1, 1), "zeros", 1)
        and module.weight.dtype == torch.float32
        and not module.in_channels % CHANNEL_MULTIPLE
        and not module.out_channels % CHANNEL_MULTIPLE
        and min(module.in_channels, module.out_channels) >= MIN_CHANNELS
        and module.in_channels * module.out_channels <= MAX_FILTERS
    )


def is_faster(images: Tensor) -> bool:
    """Return whether the algorithm can compute these images, and is faster.

    Each thread has images of its own, so fewer images than threads would leave some without work.
    """
    count, _, height, width = images.shape
    tiles, threads = -(-height // TILE) * -(-width // TILE), torch.get_num_threads()
    return (
        images.dtype == torch.float32
        and images.device.type == "cpu"
        and count >= threads
        and count * tiles >= MIN_TILES * threads
        and DIRECT * height * width >= MIN_SAVING * PER_TILE * tiles
    )
