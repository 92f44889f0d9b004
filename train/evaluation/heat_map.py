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
    # (N, C, H, W) with the images' aspect ratio, in the later half: a vision transformer has them at its start.
    maps = [
        output
        for output in outputs[len(outputs) // 2 :]
        if output.ndim == 4
        and min(output.shape[1:]) > 1
        and output.shape[2] * images.shape[3] == output.shape[3] * images.shape[2]
    ]
    if not maps:
        return None
    (gradient,) = torch.autograd.grad(logits.gather(1, classes[:, None]).sum(), maps[-1])
    heat = (gradient.mean((2, 3), keepdim=True) * maps[-1].detach()).sum(1, keepdim=True).relu()
    heat = interpolate(heat.float(), size=images.shape[2:], mode="bilinear")[:, 0]
    return heat / heat.amax((1, 2), keepdim=True).clamp(min=1e-12)


def show_heat(pixels: Tensor, heat: Tensor) -> Tensor:
    """Return (C, H, W) bytes in color, with (H, W) heat over them in red."""
    red = torch.tensor([255.0, 0.0, 0.0]).view(3, 1, 1)
    return torch.lerp(pixels.expand(3, -1, -1).float(), red.expand(3, *heat.shape), 0.6 * heat).round().to(torch.uint8)
