"""Losses by name, as sums over a rank's images; the trainer divides them by the size of the global batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from train.data.feeds.batches import IGNORE_LABEL
from train.setting_groups.arguments import parse_class_weights
from train.setting_groups.optimization import LOSSES
from train.settings import TrainSettings

FOCAL_GAMMA = 2
OF_NUMBERS: Mapping[str, Callable[..., Tensor]] = {
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
}


@dataclass(frozen=True)
class Loss:
    """A loss of (N, outputs) logits; `weights` are the classes', and `targets` has a row for each label number.

    Without `targets` the label number is the class. bce is the mean over the outputs, as in timm; for several labels,
    `weights` count where a label is there. Focal loss is of arXiv:1708.02002.
    """

    name: str = "cross_entropy"
    smoothing: float = 0.0
    weights: Tensor | None = None
    targets: Tensor | None = None

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the fp32 losses of a batch; images with IGNORE_LABEL add nothing."""
        logits = logits.float()
        if self.name == "cross_entropy":
            return functional.cross_entropy(
                logits,
                labels,
                weight=self.weights,
                reduction="sum",
                ignore_index=IGNORE_LABEL,
                label_smoothing=self.smoothing,
            )
        known = labels.clamp(min=0)
        if self.targets is not None:
            losses = self.of_targets(logits, self.targets[known])
        else:
            losses = self.of_classes(logits, known)
        return torch.where(labels != IGNORE_LABEL, losses, 0).sum()

    def of_targets(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each image, given its row of targets."""
        if self.name in OF_NUMBERS:
            numbers: Tensor = OF_NUMBERS[self.name](logits, targets, reduction="none")
            return numbers.mean(1)
        losses = functional.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.weights, reduction="none")
        if self.name == "focal":
            losses = losses * (targets - logits.sigmoid()).abs() ** FOCAL_GAMMA
        return losses.mean(1)

    def of_classes(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each image, given its class."""
        if self.name == "focal":
            likely = logits.log_softmax(1).gather(1, labels[:, None])[:, 0]
            losses = -likely * (1 - likely.exp()) ** FOCAL_GAMMA
        else:
            spread = self.smoothing / logits.shape[1]
            wanted = functional.one_hot(labels, logits.shape[1]) * (1 - self.smoothing) + spread
            losses = functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none").mean(1)
        return losses if self.weights is None else losses * self.weights[labels]


def loss_name(settings: TrainSettings) -> str:
    """Return the loss of a run."""
    loss = settings.optim.loss
    return LOSSES[settings.data.task][0] if loss == "auto" else loss


def training_loss(settings: TrainSettings, classes: Sequence[str], counts: Tensor, targets: Tensor | None) -> Loss:
    """Return the loss that a run minimizes; `counts` are the classes' numbers of training images."""
    weights = settings.optim.class_weights
    of_classes = class_weights(weights, classes, counts) if weights else None
    return Loss(loss_name(settings), settings.optim.label_smoothing, of_classes, targets)


def evaluation_loss(loss: Loss) -> Loss:
    """Return the loss that is reported of an evaluation: one that no weight and no smoothing changes."""
    if loss.targets is None:
        return Loss()
    return Loss("bce" if loss.name == "focal" else loss.name, targets=loss.targets)


def class_weights(text: str, classes: Sequence[str], counts: Tensor) -> Tensor:
    """Return the weight of each class; raises `UserError` for a class that is not there, and for another text.

    `auto` weights each class inversely to its number of images, so that a mean image has a weight of 1.
    """
    if text == "auto":
        return (counts.sum() / (len(classes) * counts.clamp(min=1))).float()
    return torch.tensor(parse_class_weights(text, classes), device=counts.device)
