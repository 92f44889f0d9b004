"""What a model is: its head, its parameters and its operations, and whether it takes an image."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from entrypoint.core.errors import first_line
from train.models.cnn import GrayscaleToRGB
from train.settings import ImageShape

# Sides of the matrices by which the peak is measured, and how often they are multiplied.
PRODUCT_SIDE, PRODUCTS = {"cpu": 1024, "cuda": 8192}, 2


def dry_run(model: nn.Module, shape: tuple[int, int, int], device: torch.device | None = None) -> object:
    """Return what the model makes of one blank (C, H, W) image in evaluation mode, then restore its mode."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return model(torch.zeros(1, *shape, device=device))
    finally:
        model.train(training)


def count_multiply_adds(model: nn.Module, shape: ImageShape, device: torch.device) -> int:
    """Return the multiply-adds of products and convolutions in one image's forward pass, as PyTorch counts them."""
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton (torch 2.15)

    with FlopCounterMode(display=False) as counter:
        dry_run(model, shape, device)
    return int(counter.get_total_flops()) // 2


def count_training_flops(model: nn.Module, shape: ImageShape) -> int:
    """Return the operations of products and convolutions in one image's forward and backward pass.

    Sums count as operations too. Frozen layers need fewer. No gradient is stored, and none sent to other ranks. 0 for a
    model that has no gradients in evaluation.
    """
    from torch.utils.flop_counter import FlopCounterMode  # it imports Triton (torch 2.15)

    image = torch.zeros(1, *shape, device=next(model.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        outputs = model.eval()(image)
        if not outputs.requires_grad:
            return 0
        torch.autograd.grad(outputs.float().sum(), trained, allow_unused=True)
    return int(counter.get_total_flops())


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Return the operations a second that a large product of matrices or a convolution reaches in a number format.

    Two libraries compute them on CPUs, and either one may be much faster.
    """
    side = PRODUCT_SIDE[device.type]
    matrix = torch.rand(side, side, dtype=dtype, device=device)
    images = torch.rand(4, 256, 16, 16, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    kernel = torch.rand(256, 256, 3, 3, dtype=dtype, device=device).to(memory_format=torch.channels_last)
    work = {
        2 * side**3: lambda: matrix @ matrix,
        2 * images.numel() * 256 * 9: lambda: torch.nn.functional.conv2d(images, kernel, padding=1),
    }
    return max(flops / min(seconds_of(run) for _ in range(PRODUCTS)) for flops, run in work.items())


def seconds_of(run: Callable[[], torch.Tensor]) -> float:
    """Return how long a computation takes, a GPU's too."""
    began = time.perf_counter()
    run().flatten()[0].item()
    return time.perf_counter() - began


def count_parameters(model: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def single_image_problem(model: nn.Module, shape: ImageShape) -> str:
    """Return why a model cannot be trained on one image at a time, empty if it can.

    BatchNorm raises ValueError if a channel has a single value in training mode.
    """
    model.train()
    try:
        with torch.no_grad():
            model(torch.zeros(1, *shape))
    except ValueError as error:
        return first_line(error)
    return ""


# Names of the weights that hold one row for each class.
HEAD_LAYERS = (nn.Linear, nn.Conv2d)


def head_names(model: nn.Module, classes: int) -> tuple[str, ...]:
    """Return the names of the modules that output the logits, () if none is found.

    It is the last linear or 1x1 convolution layer with as many outputs as there are classes. timm's models say which it
    is, and some have two.
    """
    if isinstance(model, GrayscaleToRGB):
        return tuple(f"model.{name}" for name in head_names(model.model, classes))
    get_classifier = getattr(model, "get_classifier", None)
    if callable(get_classifier):
        found, listed = get_classifier(), getattr(model, "pretrained_cfg", {}).get("classifier")
        own = found if isinstance(found, (tuple, list)) else (found,)
        also = listed if isinstance(listed, tuple) else (listed,)  # VOLO's second one is only here
        names = tuple(
            name for name, module in model.named_modules() if name in also or any(module is one for one in own)
        )
        if names:
            return names
    last = ""
    for name, module in model.named_modules():
        outputs = getattr(module, "out_features", getattr(module, "out_channels", None))
        if isinstance(module, HEAD_LAYERS) and outputs == classes:
            last = name
    return (last,) if last else ()


def in_modules(parameter: str, modules: tuple[str, ...]) -> bool:
    """Return whether a parameter's name is inside one of the modules."""
    return any(parameter.startswith(f"{name}.") for name in modules)
