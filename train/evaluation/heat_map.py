"""Where in an image a network finds the class that it names, and which images look alike to it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils.hooks import RemovableHandle

from train.models.inspection import head_names
from train.transforms.normalize import Normalize

# Images whose features a report shows, and how many of them are computed at once. Other ranks wait meanwhile.
PROJECTED, PROJECTED_AT_ONCE, LIMIT_S, MAX_VALUES = 256, 16, 5.0, 1 << 25
# Names of more classes cover each other.
MAX_PROJECTED_CLASSES = 30


def heat_maps(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor | None:
    """Return (N, H, W) heat from 0 to 1 of (N, C, H, W) inputs for one class each: Grad-CAM (Selvaraju et al., 2017).

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


def record_features(model: nn.Module, outputs: int) -> tuple[list[Tensor], RemovableHandle] | None:
    """Return a list that gets the (N, features) inputs of the layer that gives the outputs, and what ends that.

    None without such a layer.
    """
    heads = head_names(model, outputs)
    rows: list[Tensor] = []

    def keep(_: nn.Module, inputs: Any) -> None:
        rows.extend(part.detach().flatten(1).float() for part in inputs[:1] if part.ndim > 1)

    return (rows, model.get_submodule(heads[-1]).register_forward_pre_hook(keep)) if heads else None


def features_by_class(
    model: nn.Module, sample: Sequence[tuple[Tensor, Tensor]], classes: Sequence[str], normalize: Normalize
) -> dict[str, list[list[float]]]:
    """Return (x, y) of images by class: where their features differ most, by principal components.

    `sample` are (N, C, H, W) bytes with their labels, negative ones of no image. A slow network gets as many of them as
    fit into `LIMIT_S`, and wide features fewer. Nothing is returned where no layer is the head, where it does not get
    a row of each image, and for many classes.
    """
    if (
        not sample
        or len(classes) > MAX_PROJECTED_CLASSES
        or not (recorded := record_features(model.eval(), len(classes)))
    ):
        return {}
    pixels, labels = (torch.cat(parts) for parts in zip(*sample, strict=True))
    rows, hook = recorded
    device, until = next(model.parameters()).device, time.monotonic() + LIMIT_S
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    seen: list[int] = []
    try:
        with torch.no_grad():
            for part in torch.split(order, PROJECTED_AT_ONCE):
                if time.monotonic() < until and sum(row.numel() for row in rows) < MAX_VALUES:
                    model(normalize(pixels[part].permute(0, 2, 3, 1)).to(device))
                    seen.append(len(part))
    finally:
        hook.remove()
    if [len(row) for row in rows] != seen or sum(seen) < 2:
        return {}
    features = torch.cat(rows)
    features -= features.mean(0)
    # By the products of rows, as there are fewer images than features.
    values, vectors = torch.linalg.eigh(features @ features.T)
    places = (vectors * values.clamp(min=0).sqrt())[:, -2:].flip(1).tolist()
    by_class: dict[str, list[list[float]]] = {name: [] for name in classes}
    for label, place in zip(labels[order].tolist(), places, strict=False):
        if label >= 0:
            by_class[classes[label]].append([round(part, 4) for part in place])
    return by_class


def show_heat(pixels: Tensor, heat: Tensor) -> Tensor:
    """Return (C, H, W) bytes in color, with (H, W) heat over them in red."""
    red = torch.tensor([255.0, 0.0, 0.0]).view(3, 1, 1)
    return torch.lerp(pixels.expand(3, -1, -1).float(), red.expand(3, *heat.shape), 0.6 * heat).round().to(torch.uint8)
