"""The models by name: the book's CNN for any input, and every torchvision classifier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from entrypoint.core.errors import Refused, did_you_mean, first_line, shown
from train.acceleration.small_conv import as_defined
from train.models.inspection import see_blank
from train.models.speednet import WIDTHS, SpeedNet

Shape = tuple[int, int, int]

# Classifiers with auxiliary heads return a tuple while training; the plain head is what we train.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "googlenet": {"aux_logits": False, "init_weights": True},
    "inception_v3": {"aux_logits": False, "init_weights": True},
}


class CNN(nn.Module):
    """The book's CNN (chapter 2): two 3x3 convolutions with pooling, two fully connected layers.

    1,630,090 parameters on 28x28x1 and 2,122,186 on 32x32x3 with ten classes. Input (N, C, H, W), float; output
    (N, classes) logits. Height and width must be at least 4.
    """

    def __init__(self, shape: Shape, classes: int, *, bias: bool = True) -> None:
        super().__init__()
        channels, height, width = shape
        self.layer1 = block(channels, 32, bias)
        self.layer2 = block(32, 64, bias)
        self.fc1 = nn.Linear(64 * (height // 4) * (width // 4), 512, bias=bias)
        self.fc2 = nn.Linear(512, classes, bias=bias)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of a batch."""
        features = self.layer2(self.layer1(images)).flatten(1)
        logits: Tensor = self.fc2(torch.relu(self.fc1(features)))
        return logits


def block(inputs: int, outputs: int, bias: bool) -> nn.Sequential:
    """Return a convolution that keeps the size, pooling that halves it, and ReLU.

    The book has ReLU before the pooling. Values and gradients are the same to the bit, since the largest of four stays
    so; but ReLU has a quarter of the elements, and a step of batch 128 takes 14 % less (two cores, fp32).
    """
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=bias), nn.MaxPool2d(2), nn.ReLU())


class ThreeChannels(nn.Module):
    """Feeds grey pictures to a model that expects colour, by repeating the one channel."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Return the model's logits for (N, 1, H, W) images."""
        logits: Tensor = self.model(images.expand(-1, 3, -1, -1))
        return logits


def build_model(name: str, shape: Shape, classes: int, *, bias: bool) -> nn.Module:
    """Return a freshly initialised model for (channels, height, width) images.

    Raises `Refused` for an unknown name, or an input that the model cannot take.
    """
    if name == "cnn":
        if min(shape[1:]) < 4:
            raise Refused(f"TRAIN_MODEL=cnn: needs at least 4x4 pixels, and the images have {shape[1]}x{shape[2]}")
        return CNN(shape, classes, bias=bias)
    if name in WIDTHS and bias:
        speednet = SpeedNet(WIDTHS[name], shape, classes)
        try_on(speednet, name, shape)
        return speednet
    if not bias:
        raise Refused(f"TRAIN_BIAS=0: only the cnn can do without biases, not {name}; leave it unset")
    model = torchvision_model(name, shape, classes)
    try_on(model, name, shape)
    return model


def with_versions(model: nn.Module, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state for the model to load, with its modules' versions, which go lost where tensors alone are kept.

    Torchvision's MNASNet loads nothing without.
    """
    marked = OrderedDict(state)
    marked._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]
    return marked


def torchvision_model(name: str, shape: Shape, classes: int) -> nn.Module:
    """Return a torchvision classifier by name; raises `Refused` where there is none of that name."""
    try:
        from torchvision import models
    except (ImportError, RuntimeError, AttributeError) as error:
        raise Refused(f"TRAIN_MODEL={name}: torchvision cannot be loaded here ({error}); only cnn can") from None
    known = models.list_models(module=models)
    if name not in known:
        raise Refused(
            f"TRAIN_MODEL={shown(name)}: no such model. {did_you_mean(name, ['cnn', *WIDTHS, *known])}It is cnn,"
            " speednet or a torchvision classifier such as resnet18."
        )
    arguments = dict(ARGUMENTS.get(name, {}))
    if name.startswith("vit_"):
        arguments["image_size"] = shape[1]
    if name.startswith("maxvit_"):
        arguments["input_size"] = shape[1:]
    try:
        model: nn.Module = models.get_model(name, weights=None, num_classes=classes, **arguments)
    except (ValueError, RuntimeError, AssertionError) as error:
        raise unfit(name, shape, error) from None
    return ThreeChannels(model) if shape[0] == 1 else model


def try_on(model: nn.Module, name: str, shape: Shape) -> None:
    """Run one blank image through the model; raises `Refused` where it cannot take that size."""
    try:
        see_blank(model, shape)
    except (RuntimeError, ValueError, AssertionError) as error:
        raise unfit(name, shape, error) from None


def unfit(name: str, shape: Shape, error: Exception) -> Refused:
    """Return the refusal of an input that a model cannot take."""
    size = f"{shape[0]}x{shape[1]}x{shape[2]}"
    cause = first_line(error)
    to_do = "take another model, or for an imagefolder TRAIN_IMAGE_SIZE=224"
    return Refused(f"TRAIN_MODEL={name}: cannot take {size} images ({cause}); {to_do}")


def count_multiply_adds(model: nn.Module, shape: Shape, device: torch.device) -> int:
    """Return the multiply-adds of one image's forward pass in products and convolutions, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter, as_defined(model):
        see_blank(model, shape, device)
    return int(counter.get_total_flops()) // 2


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
