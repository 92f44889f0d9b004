"""Where in an image a network finds the class that it names: Grad-CAM (Selvaraju et al., 2017)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate


def heat_maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor | None:
    """Return (N, H, W) heat from 0 to 1 of (N, C, H, W) inputs for one class each.

    None for a network whose last layers have no map of features, such as a vision transformer.
    """
    outputs: list[Tensor] = []

    def keep(_: nn.Module, __: Any, output: object) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            outputs.append(output)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    hooks = [module.register_forward_hook(keep) for module in leaves]
    try:
        with torch.enable_grad():
            logits = model(images.requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    # In the later half of a network; a vision transformer has them at its start.
    maps = [(output, order) for output in outputs[len(outputs) // 2 :] if (order := channels_first(output, images))]
    if not maps:
        return None
    last, order = maps[-1]
    (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), last)
    features, gradient = last.detach().permute(order), gradient.permute(order)
    heat = (gradient.mean((2, 3), keepdim=True) * features).sum(1, keepdim=True).relu()
    heat = interpolate(heat.float(), size=images.shape[2:], mode="bilinear")[:, 0]
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=1e-12)


def channels_first(output: Tensor, images: Tensor) -> tuple[int, ...]:
    """Return the order of dimensions that makes a map of features (N, C, H, W), empty for what is no map.

    A map has the aspect ratio of the images.
    """
    if output.ndim == 4 and min(output.shape[1:]) > 1:
        for order in ((0, 1, 2, 3), (0, 3, 1, 2)):  # the second is that of timm's Swin
            height, width = output.permute(order).shape[2:]
            if height * images.shape[3] == width * images.shape[2]:
                return order
    return ()


def show_heat(pixels: Tensor, heat: Tensor) -> Tensor:
    """Return (C, H, W) bytes in color, with (H, W) heat over them in red."""
    red = torch.tensor([255.0, 0.0, 0.0]).view(3, 1, 1)
    return torch.lerp(pixels.expand(3, -1, -1).float(), red.expand(3, *heat.shape), 0.6 * heat).round().to(torch.uint8)
