"""The book's network, and an adapter for grayscale images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from train.settings import ImageShape


class CNN(nn.Module):
    """The book's CNN (chapter 2): two 3x3 convolutions with pooling, two fully connected layers.

    1,630,090 parameters on 28x28x1 and 2,122,186 on 32x32x3 with ten classes. Input (N, C, H, W), float; output
    (N, classes) logits. Height and width must be at least 4.
    """

    def __init__(self, shape: ImageShape, classes: int, *, bias: bool = True) -> None:
        super().__init__()
        channels, height, width = shape
        self.layer1 = conv_block(channels, 32, bias=bias)
        self.layer2 = conv_block(32, 64, bias=bias)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512, bias=bias)
        self.fc2 = nn.Linear(512, classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        features = self.layer2(self.layer1(images)).flatten(1)
        logits: Tensor = self.fc2(torch.relu(self.fc1(features)))
        return logits


def conv_block(inputs: int, outputs: int, *, bias: bool) -> nn.Sequential:
    """Return a convolution that keeps the size, 2x2 max pooling, and ReLU.

    The book has ReLU before the pooling. Values and gradients are bitwise identical, because ReLU does not change the
    order.
    Why: ReLU has a quarter of the elements after the pooling.
    """
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias), nn.MaxPool2d(2), nn.ReLU())


class GrayscaleToRGB(nn.Module):
    """Repeats the channel of grayscale images for a model that expects RGB."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the model's logits for (N, 1, H, W) images."""
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits
