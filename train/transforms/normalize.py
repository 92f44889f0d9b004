"""Normalization of batches by the statistics of the training set."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from train.acceleration.memory_format import memory_format


@dataclass(frozen=True)
class Normalize:
    """Bytes to floats of mean 0 and deviation 1 a channel; `mean` and `scale` are (1, C, 1, 1)."""

    mean: Tensor
    scale: Tensor
    layout: torch.memory_format = torch.channels_last

    @staticmethod
    def of(mean: Tensor, deviation: Tensor, device: torch.device, *, channels_last: bool = True) -> Normalize:
        """Return the normalization by (C,) means and deviations of bytes."""
        shape = (1, -1, 1, 1)
        scale = 1 / deviation.clamp(min=1.0)
        layout = memory_format(channels_last=channels_last)
        return Normalize(mean.view(shape).to(device), scale.view(shape).to(device), layout)

    def __call__(self, images: Tensor) -> Tensor:
        """Return (N, H, W, C) bytes as (N, C, H, W) floats in this one's layout, on its device."""
        count, height, width, channels = images.shape
        # As long rows, whose elements stand in memory one behind the other, this takes a tenth of the time.
        floats = images.to(self.mean.device, non_blocking=True).reshape(count, -1).float()
        mean, scale = (part.flatten().repeat(height * width) for part in (self.mean, self.scale))
        floats = floats.sub_(mean).mul_(scale).view(count, height, width, channels).permute(0, 3, 1, 2)
        return floats.contiguous(memory_format=self.layout)
