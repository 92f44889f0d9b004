"""What an evaluation finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from train.evaluation.confidence import Confidence


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
