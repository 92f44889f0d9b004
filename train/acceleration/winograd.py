"""Replaces 3x3 convolutions on CPUs by Winograd's algorithm, which needs 2 to 4 times fewer multiplications.

Lavin and Gray, 2015 (arXiv:1509.09308), F(4x4, 3x3): 36 multiplications for 4x4 output pixels instead of 144.
oneDNN has no such kernel for x86 CPUs. Sums round differently, by up to 3e-4 of their standard deviation.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from entrypoint.core.errors import ExitCode, UserError
from train.acceleration.faster_conv import FasterConv2d, is_plain
from train.kernels.library import load_kernel

# Channels are computed in groups.
CHANNEL_MULTIPLE = 8


class OpenMP(ctypes.Structure):
    """Functions of the OpenMP runtime of this process, and the number of threads."""

    _fields_ = (
        ("parallel", ctypes.c_void_p),
        ("thread_number", ctypes.c_void_p),
        ("team_size", ctypes.c_void_p),
        ("threads", ctypes.c_int),
    )


# Images, height, width, input and output channels.
Shape = ctypes.c_int * 5
Strides = ctypes.c_ssize_t * 4


class WinogradKernel:
    """The functions of the library. They take addresses of float32 values, images in channels_last.

    Shapes are (images, height, width, input channels, output channels).
    """

    def __init__(self, path: Path) -> None:
        """Load a library; raises `OSError` or `AttributeError` where it or OpenMP cannot be used."""
        library = ctypes.CDLL(str(path))
        self.compute_forward, self.compute_backward = library.winograd_forward, library.winograd_backward
        pointer = ctypes.c_void_p
        start = (ctypes.POINTER(OpenMP), Shape, pointer, pointer, Strides)
        self.compute_forward.argtypes = (*start, pointer)
        self.compute_backward.argtypes = (*start, pointer, pointer, pointer)
        # Symbols resolve as torch's own do, so that both use the same threads: a preloaded runtime comes first.
        process = ctypes.CDLL(None)
        names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
        self.functions = [ctypes.cast(getattr(process, name), pointer).value for name in names]

    def run(self, compute: Callable[..., int], images: Tensor, filters: Tensor, *others: int | None) -> None:
        """Have one of the two functions compute, with the addresses that it takes besides; raises `MemoryError`.

        The forward one writes the convolution. The other one takes its gradient, and writes those of images and
        filters, but not where the address is None.
        """
        count, channels, height, width = images.shape
        openmp = OpenMP(*self.functions, torch.get_num_threads())
        sizes = Shape(count, height, width, channels, len(filters))
        if compute(openmp, sizes, images.data_ptr(), filters.data_ptr(), Strides(*filters.stride()), *others):
            raise MemoryError("no memory for a convolution or its gradient")


@cache
def winograd_kernel() -> WinogradKernel | None:
    """Return the library's functions, None where it is not installed or torch has no OpenMP that it can use."""
    return load_kernel("winograd", WinogradKernel)


convolution_backward = torch.ops.aten.convolution_backward

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
    """A 3x3 convolution that uses Winograd's algorithm where that is faster: in fp32, with enough images and pixels.

    A pixel that is infinite or no number spreads over its tile, so over more pixels than by torch.
    """

    def compute(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the convolution, None where torch is to compute it."""
        floats = all(one is None or one.dtype == torch.float32 for one in (weight, bias))
        observed = torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu")
        if observed or not floats or weight.device.type != "cpu" or not has_settings(self) or not is_faster(images):
            return None
        result = convolve(images, weight)
        return result if bias is None else result + bias.view(1, -1, 1, 1)


def convolve(images: Tensor, filters: Tensor) -> Tensor:
    """Return the convolution of (N, C, H, W) images by (K, C, 3, 3) filters, float32, in channels_last."""
    # Copies are made here, so that they have gradients of any order.
    last = images.contiguous(memory_format=torch.channels_last)
    result: Tensor = WinogradConvolution.apply(last, dense(filters))
    return result


class WinogradConvolution(torch.autograd.Function):
    """A 3x3 convolution with a border of one zero, of float32 images in channels_last and filters without gaps."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, filters: Tensor) -> Tensor:
        """Return the convolution, in channels_last."""
        ctx.save_for_backward(images, filters)
        count, _, height, width = images.shape
        result = images.new_empty((count, height, width, len(filters))).permute(0, 3, 1, 2)
        functions = kernel()
        functions.run(functions.compute_forward, images, filters, result.data_ptr())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of images and filters, where they are needed; torch computes those of higher order."""
        images, filters = ctx.saved_tensors
        if torch.is_grad_enabled():
            of_images, of_filters, _ = convolution_backward(
                *(gradient, images, filters, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
                [*ctx.needs_input_grad, False],
            )
            return of_images, of_filters
        gradient = gradient.resolve_neg().contiguous(memory_format=torch.channels_last)
        # Hooks on saved tensors may return other strides.
        images, filters = images.contiguous(memory_format=torch.channels_last), dense(filters)
        results = [
            torch.empty_like(one) if needed else None
            for one, needed in zip((images, filters), ctx.needs_input_grad, strict=True)
        ]
        addresses = (None if one is None else one.data_ptr() for one in results)
        functions = kernel()
        functions.run(functions.compute_backward, images, filters, gradient.data_ptr(), *addresses)
        return results[0], results[1]


def dense(filters: Tensor) -> Tensor:
    """Return filters whose gradient can have their strides: a copy of those that overlap or have gaps."""
    return filters if torch.empty_like(filters).stride() == filters.stride() else filters.clone()


def kernel() -> WinogradKernel:
    """Return the compiled functions, which `use_winograd` has found."""
    found = winograd_kernel()
    assert found
    return found


def use_winograd(model: nn.Module) -> nn.Module:
    """Return the model with Winograd's algorithm where it suits; raises `UserError` where it cannot be loaded."""
    if not winograd_kernel():
        raise UserError(
            "TRAIN_WINOGRAD: the compiled kernel cannot be loaded, or torch has no OpenMP. Set TRAIN_WINOGRAD=off.",
            ExitCode.MACHINE,
        )
    for module in model.modules():
        if is_suited(module):
            module.__class__ = WinogradConv2d
    return model


def is_suited(module: nn.Module) -> TypeGuard[nn.Conv2d]:
    """Return whether a module is a convolution that the algorithm can compute, with channels for which it is faster."""
    return (
        is_plain(module)
        and has_settings(module)
        and module.weight.dtype == torch.float32
        and not module.in_channels % CHANNEL_MULTIPLE
        and not module.out_channels % CHANNEL_MULTIPLE
        and min(module.in_channels, module.out_channels) >= MIN_CHANNELS
        and module.in_channels * module.out_channels <= MAX_FILTERS
    )


def has_settings(module: nn.Conv2d) -> bool:
    """Return whether a convolution has the settings of this algorithm; a user may change them at any time."""
    return (module.kernel_size, module.stride, module.dilation) == ((3, 3), (1, 1), (1, 1)) and (
        (module.padding, module.padding_mode, module.groups) == ((1, 1), "zeros", 1)
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
