"""Tensors of batches: copied to the device, resized, and logits averaged over copies of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

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


# Pixels of a shift for images of 32x32. It scales with the image's shorter side.
SHIFT_AT_32PX = 1


def averaged_logits(model: Callable[[Tensor], Tensor], images: Tensor, kind: str) -> Tensor:
    """Return the mean of the model's logits over the copies of (N, C, H, W) images, (N, classes) in fp32.

    `kind` is a value of TRAIN_TEST_TIME_AUGMENT. The unshifted copies count half, as in airbench (arXiv:2404.00498).
    """
    if kind == "off":
        return model(images).float()
    logits = flip_mean(model, images)
    if kind == "flip":
        return logits
    shifted = torch.stack([flip_mean(model, one) for one in shifted_copies(images)])
    return logits.lerp(shifted.mean(0), 0.5)


def flip_mean(model: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """Return the mean of the logits of the images and of their mirror images."""
    return (model(images).float() + model(images.flip(-1)).float()) / 2


def shifted_copies(images: Tensor) -> Iterator[Tensor]:
    """Yield the images shifted to the lower right and to the upper left; their edges are reflected."""
    height, width = images.shape[-2:]
    shift = max(1, SHIFT_AT_32PX * min(height, width) // 32)
    mode = "reflect" if shift < min(height, width) else "replicate"  # one pixel has no other to reflect
    padded = pad(images, (shift,) * 4, mode=mode)
    layout = torch.channels_last if images.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    for start in (0, 2 * shift):
        yield padded[..., start : start + height, start : start + width].contiguous(memory_format=layout)
