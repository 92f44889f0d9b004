"""How a model is evaluated, and what an evaluation finds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from train.checkpoint.metadata import PLAIN_OUTPUTS, OutputScale
from train.evaluation.confidence import Confidence
from train.optimization.losses import Loss


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
