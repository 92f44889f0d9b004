"""Keep the surest mistakes of an evaluation as small images, for the report."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from train.data.feeds.batches import IGNORE_LABEL
from train.transforms.normalize import Normalize

KEPT = 12
# Sides of a kept image in pixels; a larger one is reduced.
MAX_SIDE = 96


@dataclass(frozen=True, order=True)
class Mistake:
    """A wrongly predicted image: the probability of the wrong class, both classes, and (C, H, W) bytes."""

    probability: float
    label: int
    predicted: int
    pixels: Tensor = field(compare=False)


@dataclass
class MistakeCollector:
    """Collects a rank's surest mistakes batch by batch."""

    normalize: Normalize
    kept: list[Mistake] = field(default_factory=list)

    def add(self, images: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Look at a batch of normalized (N, C, H, W) images with their (N, classes) logits."""
        shares, predicted = logits.softmax(1).max(1)
        wrong = ((predicted != labels) & (labels != IGNORE_LABEL)).nonzero().flatten()
        if not len(wrong):
            return
        best = wrong[shares[wrong].topk(min(KEPT, len(wrong))).indices]
        chosen = images[best].float() / self.normalize.scale + self.normalize.mean
        pixels = chosen.round().clamp(0, 255).to(torch.uint8).cpu()
        rows = zip(shares[best].tolist(), labels[best].tolist(), predicted[best].tolist(), pixels, strict=True)
        self.kept = sorted([*self.kept, *(Mistake(*row) for row in rows)], reverse=True)[:KEPT]


def as_json(mistakes: list[Mistake], classes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return mistakes for evaluation.json, each image as a PNG in base64."""
    return [
        {
            "class": classes[one.label],
            "predicted": classes[one.predicted],
            "probability": round(one.probability, 4),
            "png": png_of(one.pixels),
        }
        for one in mistakes
    ]


def png_of(pixels: Tensor) -> str:
    """Return (C, H, W) bytes as a small PNG in base64; only gray and color images can be shown."""
    if len(pixels) not in (1, 3):
        return ""
    array = (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy()
    image = Image.fromarray(array)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    out = io.BytesIO()
    image.save(out, format="PNG")
    return base64.b64encode(out.getvalue()).decode()
