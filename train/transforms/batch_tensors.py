"""What several transforms do with tensors: copy them to the device, and resize batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from train.settings import ImageShape


def resize_batch(images: Tensor, shape: ImageShape) -> Tensor:
    """Return (N, C, H, W) floats resized to (C, H, W), bilinear with antialiasing, as torchvision resizes tensors."""
    if tuple(images.shape[2:]) == shape[1:]:
        return images
    resized: Tensor = interpolate(images, size=shape[1:], mode="bilinear", antialias=True, align_corners=False)
    return resized


def resize_batches(batches: Iterator[tuple[Tensor, Tensor]], shape: ImageShape) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of (images, labels) with images of this shape."""
    for images, labels in batches:
        yield resize_batch(images, shape), labels


def copy_to_device(numbers: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on the device.

    A copy from ordinary memory waits until a GPU has computed everything before it. One from pinned memory does not.
    """
    if device.type != "cuda" or numbers.device.type == "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
