"""How a model is evaluated, and what an evaluation finds.

Also how sure the model is and how often it is right then: calibration, its temperature, precision and recall.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from train.checkpoint.metadata import PLAIN_OUTPUTS, OutputScale
from train.data.feeds.batches import IGNORE_LABEL
from train.distributed.process_group import ProcessGroup
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


# Thresholds that are tried, in steps of a fiftieth.
THRESHOLDS = tuple(step / 50 for step in range(1, 50))


@dataclass
class TargetScores:
    """What a rank has seen of an evaluation: the outputs and the label number of each image.

    The threshold may be chosen on these images, by the best micro F1.
    """

    method: EvalMethod
    device: torch.device
    totals: Tensor = field(init=False)
    logits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Start at zero: a stop request, the sum of the losses, and the images."""
        self.totals = torch.zeros(3, dtype=torch.float64, device=self.device)

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """Keep a batch of (N, outputs) fp32 logits; images with IGNORE_LABEL do not count."""
        counted = labels != IGNORE_LABEL
        self.totals[1] += self.method.loss(logits, labels)
        self.totals[2] += counted.sum()
        self.logits.append(logits[counted].cpu())
        self.labels.append(labels[counted].cpu())

    def result(self, sums: Tensor, group: ProcessGroup) -> EvalResult:
        """Return the result of all ranks' images; `sums` are their totals."""
        assert self.method.loss.targets is not None, "the task has targets"
        mine = (torch.cat(self.logits), torch.cat(self.labels)) if self.logits else None
        gathered = [part for part in group.gather(mine, tuple[Tensor, Tensor] | None) if part]
        logits = torch.cat([part[0] for part in gathered])
        targets = self.method.loss.targets.cpu()[torch.cat([part[1] for part in gathered])]
        plain = EvalResult(0.0, float(sums[1] / sums[2]), int(sums[2]))
        kind = self.of_numbers if self.method.outputs.mean else self.of_labels
        return kind(plain, logits, targets)

    def of_numbers(self, plain: EvalResult, values: Tensor, wanted: Tensor) -> EvalResult:
        """Return the result with the mean of the outputs' R2 in percent, and errors in the targets' own unit."""
        deviation = torch.tensor(self.method.outputs.deviation, dtype=torch.float64)
        error = values.double() - wanted.double()
        spread = (wanted.double() - wanted.double().mean(0)).square().sum(0)
        # A number that is the same in all images has no R2.
        share = torch.where(spread > 1e-6, 1 - error.square().sum(0) / spread, torch.nan)
        error = error * deviation
        return replace(
            plain,
            accuracy=100 * float(share.nanmean().nan_to_num()),
            class_accuracy=tuple(None if one.isnan() else 100 * float(one) for one in share),
            others={"rmse": float(error.square().mean().sqrt()), "mae": float(error.abs().mean())},
        )

    def of_labels(self, plain: EvalResult, logits: Tensor, targets: Tensor) -> EvalResult:
        """Return the result with the mean average precision in percent, and F1 at the threshold."""
        precisions = [average_precision(*pair) for pair in zip(logits.T, targets.T, strict=True)]
        known = [one for one in precisions if one is not None]
        shares, wanted = logits.sigmoid(), targets > 0
        threshold = self.method.outputs.threshold
        if self.method.chooses:
            threshold = max(THRESHOLDS, key=lambda least: (f1_scores(shares >= least, wanted)[0], -abs(least - 0.5)))
        micro, macro = f1_scores(shares >= threshold, wanted)
        return replace(
            plain,
            accuracy=100 * sum(known) / max(1, len(known)),
            class_accuracy=tuple(None if one is None else 100 * one for one in precisions),
            others={"f1_micro": 100 * micro, "f1_macro": 100 * macro, "threshold": threshold},
            confidence=Confidence(count_confidence(shares.flatten(), wanted.flatten())),
        )


def average_precision(scores: Tensor, wanted: Tensor) -> float | None:
    """Return the average precision of one label, the area below its steps; None for a label that no image has.

    Images of equal scores are one step, in whatever order they come.
    """
    if not wanted.any():
        return None
    scores, order = scores.sort(descending=True)
    hits = wanted[order].double().cumsum(0)
    is_last = torch.ones_like(scores, dtype=torch.bool)
    is_last[:-1] = scores[1:] != scores[:-1]
    taken = torch.arange(1, len(scores) + 1)[is_last]
    hits = hits[is_last]
    recall = hits / hits[-1]
    return float((recall.diff(prepend=torch.zeros(1)) * hits / taken).sum())


def f1_scores(decided: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the F1 of all (images, labels) decisions together, and the mean of the labels' own.

    A label that no image has, and that is never decided for, is left out of the mean.
    """
    right, counts = (decided & wanted).sum(0), decided.sum(0) + wanted.sum(0)
    by_label = 2 * right[counts > 0] / counts[counts > 0]
    return float(2 * right.sum() / counts.sum().clamp(min=1)), float(by_label.mean()) if len(by_label) else 0.0
