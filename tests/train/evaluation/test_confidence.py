"""How sure a model is: the measures of torchmetrics, and the temperature that torch's own optimizer finds."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from train.evaluation.results import TEMPERATURES, Confidence, count_confidence, losses_by_temperature
from train.seeding import make_generator

LOGITS = 4 * torch.randn(3000, 6, generator=make_generator("logits"))
# Right as often as a model with logits of half the size would be.
LABELS = torch.multinomial((LOGITS / 2).softmax(1), 1, generator=make_generator("labels")).flatten()


def confidence(logits: torch.Tensor = LOGITS) -> Confidence:
    shares, predicted = logits.softmax(1).max(1)
    return Confidence(count_confidence(shares, predicted == LABELS))


def test_calibration_error_is_that_of_torchmetrics() -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    wanted = metrics.MulticlassCalibrationError(num_classes=6, n_bins=15)(LOGITS.softmax(1), LABELS)
    assert confidence().error == pytest.approx(100 * float(wanted), abs=0.01)


def test_temperature_makes_probabilities_right() -> None:
    losses = losses_by_temperature(LOGITS, LABELS)
    found = TEMPERATURES[int(losses.argmin())]
    exact = torch.ones((), requires_grad=True)
    optimizer = torch.optim.LBFGS([exact], max_iter=50)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = cross_entropy(LOGITS / exact, LABELS)
        value.backward()
        return value

    optimizer.step(loss)  # type: ignore[arg-type]
    assert found == pytest.approx(exact.item(), rel=0.07)
    assert float(losses.min()) / len(LABELS) == pytest.approx(float(loss()), rel=1e-3)
    assert confidence(LOGITS / found).error < confidence().error / 3


def test_precision_and_recall_are_those_of_torchmetrics() -> None:
    metrics = pytest.importorskip("torchmetrics.functional.classification")
    shares, predicted = LOGITS.softmax(1).max(1)
    right = predicted == LABELS
    precision, recall, _ = metrics.binary_precision_recall_curve(shares, right.long(), thresholds=torch.arange(60) / 60)
    wanted = [pair for pair in zip(recall.tolist(), precision.tolist(), strict=True) if pair[0]]
    wanted = list(reversed(dict.fromkeys(wanted)))
    assert list(dict.fromkeys(confidence().precision_recall)) == [pytest.approx(pair, abs=1e-3) for pair in wanted]
