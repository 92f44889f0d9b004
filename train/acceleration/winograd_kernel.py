"""The compiled library of Winograd's convolution (`kernels/winograd.cpp`), for addresses of tensors."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

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
    """The functions of the library. They take addresses of float32 values, images in channels_last."""

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

    def forward(
        self, sizes: tuple[int, ...], images: int, filters: int, strides: tuple[int, ...], result: int, threads: int
    ) -> None:
        """Write the convolution of images; raises `MemoryError`."""
        openmp = OpenMP(*self.functions, threads)
        if self.compute_forward(openmp, Shape(*sizes), images, filters, Strides(*strides), result):
            raise MemoryError("no memory for a convolution")

    def backward(
        self,
        sizes: tuple[int, ...],
        images: int,
        filters: int,
        strides: tuple[int, ...],
        gradient: int,
        results: tuple[int | None, int | None],
        threads: int,
    ) -> None:
        """Write the gradients of images and filters, but not where the address is None; raises `MemoryError`."""
        openmp = OpenMP(*self.functions, threads)
        sizes_here, strides_here = Shape(*sizes), Strides(*strides)
        if self.compute_backward(openmp, sizes_here, images, filters, strides_here, gradient, *results):
            raise MemoryError("no memory for the gradient of a convolution")


@cache
def winograd_kernel() -> WinogradKernel | None:
    """Return the library's functions, None where it is not installed or torch has no OpenMP that it can use."""
    return load_kernel("winograd", WinogradKernel)
