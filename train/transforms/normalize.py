"""Tensors of batches: normalized, copied to the device, resized, and logits averaged over copies of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from train.acceleration.amp import memory_format
from train.checkpoint.metadata import PLAIN_OUTPUTS, Normalization, OutputScale
from train.settings import ImageShape


@dataclass(frozen=True)
class Normalize:
    """Converts bytes to floats of mean 0 and standard deviation 1 per channel; `mean` and `scale` are (1, C, 1, 1).

    `outputs` says how the model's outputs are read.
    """

    mean: Tensor
    scale: Tensor
    layout: torch.memory_format = torch.channels_last
    outputs: OutputScale = PLAIN_OUTPUTS

    @staticmethod
    def from_stats(mean: Tensor, deviation: Tensor, device: torch.device, *, channels_last: bool = True) -> Normalize:
        """Return the normalization by (C,) means and standard deviations of byte values."""
        shape = (1, -1, 1, 1)
        scale = 1 / deviation.clamp(min=1.0)
        layout = memory_format(channels_last=channels_last)
        return Normalize(mean.view(shape).to(device), scale.view(shape).to(device), layout)

    @staticmethod
    def from_metadata(saved: Normalization, device: torch.device, layout: torch.memory_format) -> Normalize:
        """Return the normalization that a checkpoint or a file of weights was saved with."""
        mean, scale = (torch.tensor(one).view(1, -1, 1, 1).to(device) for one in (saved.mean, saved.scale))
        return Normalize(mean, scale, layout, saved.outputs)

    def to_metadata(self) -> Normalization:
        """Return the numbers that a checkpoint or a file of weights holds."""
        mean, scale = (tuple(one.flatten().tolist()) for one in (self.mean, self.scale))
        return Normalization(mean=mean, scale=scale, outputs=self.outputs)

    def undo(self, images: Tensor) -> Tensor:
        """Return normalized (N, C, H, W) images as bytes on the CPU."""
        return self.pixels(images).round().clamp(0, 255).to(torch.uint8)

    def pixels(self, images: Tensor) -> Tensor:
        """Return normalized (N, C, H, W) images as floats from 0 to 255 on the CPU, in rows of pixels."""
        return (images.to(self.scale.device).float() / self.scale + self.mean).cpu().contiguous()

    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, H, W, C) bytes as (N, C, H, W) floats in `layout`, on the device of `mean`."""
        count, height, width, channels = images.shape
        # One contiguous row per image: broadcasting over the short channel axis is much slower.
        rows = images.to(self.mean.device, non_blocking=True).reshape(count, -1)
        mean, scale = (part.flatten().repeat(height * width) for part in (self.mean, self.scale))
        floats = rows.float().sub_(mean).mul_(scale).view(count, height, width, channels).permute(0, 3, 1, 2)
        if self.layout == torch.channels_last:
            return floats.contiguous(memory_format=self.layout)
        # By its strides alone, an image of one channel would still count as channels-last.
        return floats.flatten(1).view(count, channels, height, width)


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
