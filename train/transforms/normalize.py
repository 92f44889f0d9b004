"""Normalization of batches by the statistics of the training set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.acceleration.amp import memory_format
from train.checkpoint.metadata import PLAIN_OUTPUTS, Normalization, OutputScale


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
