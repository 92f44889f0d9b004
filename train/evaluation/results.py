"""How a model is evaluated, and what an evaluation finds.

Also how sure the model is and how often it is right then: calibration, its temperature, precision and recall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from train.checkpoint.metadata import PLAIN_OUTPUTS, OutputScale
from train.optimization.losses import Loss

# Bins of a model's shares, from 0 to 1. The calibration error takes four together, 15 as in Guo et al. (2017).
BINS, JOINED = 60, 4
# What logits may be divided by: from a quarter to four, in eighths of an octave.
TEMPERATURES = tuple(2 ** (step / 8) for step in range(-16, 17))
# Fewer images say too little of a temperature.
CHOOSING_IMAGES = 200


def count_confidence(shares: Tensor, right: Tensor) -> Tensor:
    """Return in (3, BINS) the number of answers with a share in each bin, the sum of the shares, and the right ones."""
    bins = (shares * BINS).long().clamp(0, BINS - 1)  # NaN of broken weights is any number
    values = torch.stack([torch.ones_like(shares), shares, right]).double()
    return values.new_zeros(3, BINS).index_add_(1, bins, values)


def losses_by_temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the cross entropy at each of TEMPERATURES."""
    losses = [cross_entropy(logits / temperature, labels, reduction="sum") for temperature in TEMPERATURES]
    return torch.stack(losses).double()


@dataclass(frozen=True)
class Confidence:
    """The answers of an evaluation by the model's share: (3, BINS) counts on the CPU, see `count_confidence`."""

    counts: Tensor

    @property
    def calibration(self) -> list[tuple[float, float, int]]:
        """Return mean share, right part and number of the answers in each of 15 bins that has any."""
        joined = self.counts.view(3, -1, JOINED).sum(2)
        rows = joined.T[joined[0] > 0].tolist()
        return [(shares / count, right / count, int(count)) for count, shares, right in rows]

    @property
    def error(self) -> float:
        """Return the expected calibration error in percent."""
        parts = [count * abs(share - right) for share, right, count in self.calibration]
        return 100 * sum(parts) / max(1.0, float(self.counts[0].sum()))

    @property
    def precision_recall(self) -> list[tuple[float, float]]:
        """Return recall and precision where only answers from each share on count, the surest first."""
        count, _, right = self.counts.flip(1).cumsum(1)
        known = count > 0
        recall, precision = right[known] / right[-1].clamp(min=1), right[known] / count[known]
        return list(zip(recall.tolist(), precision.tolist(), strict=True))


@dataclass(frozen=True)
class EvalMethod:
    """How a model is evaluated: its precision, TRAIN_TEST_TIME_AUGMENT, the number of classes, and the loss.

    Without classes, the result has neither a confusion matrix nor the accuracy of each class. A loss with targets has
    other scores, of `outputs`; these images may choose the threshold or the temperature (`chooses`).
    """

    precision: str = "fp32"
    classes: int = 0
    test_time_augment: str = "off"
    loss: Loss = field(default_factory=Loss)
    outputs: OutputScale = PLAIN_OUTPUTS
    chooses: bool = False


@dataclass(frozen=True)
class EvalResult:
    """The task's score in percent (accuracy, mAP or R2), mean loss and the number of evaluated images.

    `top5` is the percentage of images whose class is among the five most likely, 0 for fewer than six classes.
    `confusion` counts images by class (row) and predicted class (column), up to 1,000 classes. `class_accuracy` is the
    percentage of each class, None for a class without images; for other tasks the score of each output. `others` are
    further scores of the task by name. `confidence` are the answers by how sure the model was, None for numbers.
    """

    accuracy: float
    loss: float
    images: int
    top5: float = 0.0
    confusion: tuple[tuple[int, ...], ...] = ()
    class_accuracy: tuple[float | None, ...] = ()
    others: Mapping[str, float] = field(default_factory=dict)
    confidence: Confidence | None = field(default=None, compare=False)
