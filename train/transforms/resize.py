"""Resize normalized batches to the size that training or evaluation sees."""

from __future__ import annotations

from collections.abc import Iterator

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
