"""The book's network, an adapter for grayscale images, and a small network that learns CIFAR-10 fast.

That one is airbench94 (Jordan, 2024, arXiv:2404.00498), in two widths.
"""

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


# Filters of the three blocks: airbench94's for a GPU, and half of them for a CPU, a quarter of the work.
WIDTHS = {"speednet": (64, 256, 256), "speednet-half": (32, 128, 128)}
KERNEL = 2
# Narrower blocks do not train the first layer's bias: its gradient is a tenth of their step on a CPU.
MAX_FROZEN_WIDTH = 32
# The factor of the logits, and the value added to the variances of patches before whitening.
LOGIT_SCALE, WHITENING_EPS = 1 / 9, 5e-4
# The learning rate multiplier of BatchNorm's biases, for SGD.
BIAS_LR_MULTIPLIER = 64.0


class SpeedNet(nn.Module):
    """Whitened 2x2 patches, three blocks of two 3x3 convolutions, global max pooling, one linear layer.

    The half width keeps the random bias of its first layer.
    Input (N, C, H, W), float, at least 9x9; output (N, classes) logits.
    `init_whitening` sets the first layer from images.
    `lr_multipliers` has the learning rate multipliers of parameters by name.
    """

    def __init__(self, widths: tuple[int, int, int], shape: ImageShape, classes: int) -> None:
        super().__init__()
        patch = shape[0] * KERNEL**2
        self.whiten = nn.Conv2d(shape[0], 2 * patch, KERNEL)
        self.whiten.weight.requires_grad = False
        assert self.whiten.bias is not None
        self.whiten.bias.requires_grad = widths[0] > MAX_FROZEN_WIDTH
        inputs = (2 * patch, *widths[:2])
        self.blocks = nn.Sequential(*(conv_group(*pair) for pair in zip(inputs, widths, strict=True)))
        self.head = nn.Linear(widths[2], classes, bias=False)
        norms = (name for name, module in self.named_modules() if isinstance(module, nn.BatchNorm2d))
        self.lr_multipliers = {f"{name}.bias": BIAS_LR_MULTIPLIER for name in norms}

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        features = self.blocks(nn.functional.gelu(self.whiten(images)))
        logits: Tensor = self.head(features.amax((2, 3))) * LOGIT_SCALE
        return logits

    @torch.no_grad()
    def init_whitening(self, images: Tensor) -> None:
        """Set the first layer so that it returns whitened 2x2 patches, and their negatives.

        Whitened patches are uncorrelated and have equal variance.
        `images` are training images as the model gets them, (N, C, H, W) normalized floats.
        """
        side = range(KERNEL)
        shifted = [images[:, :, y : y - KERNEL + 1 or None, x : x - KERNEL + 1 or None] for y in side for x in side]
        patches = torch.stack(shifted, dim=2).permute(0, 3, 4, 1, 2).reshape(-1, images.shape[1] * KERNEL**2)
        variances, directions = torch.linalg.eigh(patches.T.double() @ patches.double() / len(patches))
        filters = (directions / (variances + WHITENING_EPS).sqrt()).T.reshape(-1, images.shape[1], KERNEL, KERNEL)
        self.whiten.weight.copy_(torch.cat((filters, -filters)))


def conv_group(inputs: int, outputs: int) -> nn.Sequential:
    """Return two convolutions, each followed by BatchNorm and GELU; the first one also has 2x2 max pooling."""
    return nn.Sequential(
        *(conv3x3(inputs, outputs), nn.MaxPool2d(2), frozen_scale_bn(outputs), nn.GELU()),
        *(conv3x3(outputs, outputs), frozen_scale_bn(outputs), nn.GELU()),
    )


def conv3x3(inputs: int, outputs: int) -> nn.Conv2d:
    """Return a 3x3 convolution that initially copies its inputs to its first outputs."""
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight[: min(inputs, outputs)])
    return layer


def frozen_scale_bn(channels: int) -> nn.BatchNorm2d:
    """Return a BatchNorm with fast running statistics that learns only its bias."""
    layer = nn.BatchNorm2d(channels, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad = False
    return layer
