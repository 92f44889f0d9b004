"""Scores of several labels and of numbers, against torchmetrics."""

from __future__ import annotations

import pytest
import torch

from tests.train.engine.learners import ALONE
from train.checkpoint.metadata import OutputScale
from train.data.feeds.batches import IGNORE_LABEL
from train.evaluation.results import EvalMethod, EvalResult, TargetScores
from train.optimization.losses import Loss

IMAGES, OUTPUTS = 200, 5


def score(loss: Loss, logits: torch.Tensor, labels: torch.Tensor, **more: object) -> EvalResult:
    counts = TargetScores(EvalMethod(loss=loss, **more), ALONE.device)
    for start in range(0, len(labels), 64):  # the last batch is smaller
        counts.add(logits[start : start + 64], labels[start : start + 64])
    return counts.result(counts.totals, ALONE)


@pytest.fixture
def several() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return logits with ties, label numbers and the table of targets; the last label is nowhere."""
    random = torch.Generator().manual_seed(1)
    table = (torch.rand(8, OUTPUTS, generator=random) < 0.4).float()
    table[:, -1] = 0
    labels = torch.randint(len(table), (IMAGES,), generator=random)
    noise = torch.randn(IMAGES, OUTPUTS, generator=random)
    return (2 * table[labels] - 1.5 + 2 * noise).round(decimals=1), labels, table


def test_scores_of_labels_are_torchmetrics(several: tuple[torch.Tensor, ...]) -> None:
    metrics = pytest.importorskip("torchmetrics.functional.classification", reason="torchmetrics is not installed")
    logits, labels, table = several
    found = score(Loss("bce", targets=table), logits, labels)
    shares, wanted = logits.sigmoid(), table[labels].long()
    expected = 100 * metrics.multilabel_average_precision(shares, wanted, OUTPUTS, average="none")
    there = wanted.any(0)
    assert [one for one in found.class_accuracy if one is not None] == pytest.approx(expected[there].tolist())
    assert [one is not None for one in found.class_accuracy] == there.tolist()
    assert found.accuracy == pytest.approx(float(expected[there].mean()))
    for average in ("micro", "macro"):
        expected = metrics.multilabel_f1_score(shares, wanted, OUTPUTS, average=average, threshold=0.499999)
        assert found.others[f"f1_{average}"] == pytest.approx(100 * float(expected))
    assert found.loss == pytest.approx(float(torch.nn.BCEWithLogitsLoss()(logits, table[labels])))


def test_threshold_is_that_of_the_best_f1(several: tuple[torch.Tensor, ...]) -> None:
    logits, labels, table = several
    loss = Loss("bce", targets=table)
    chosen = score(loss, logits, labels, chooses=True).others
    fixed = [
        score(loss, logits, labels, outputs=OutputScale(threshold=step / 50)).others["f1_micro"]
        for step in range(1, 50)
    ]
    assert chosen["f1_micro"] == max(fixed) > score(loss, logits, labels).others["f1_micro"]


def test_scores_of_numbers_are_torchmetrics() -> None:
    metrics = pytest.importorskip("torchmetrics.functional", reason="torchmetrics is not installed")
    random = torch.Generator().manual_seed(2)
    raw = torch.rand(40, 2, generator=random) * torch.tensor([3.0, 500.0])
    labels = torch.randint(40, (IMAGES,), generator=random)
    mean, deviation = raw.mean(0), raw.std(0)
    table = (raw - mean) / deviation
    outputs = OutputScale(mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))
    logits = table[labels] + 0.3 * torch.randn(IMAGES, 2, generator=random)
    found = score(Loss("mse", targets=table), logits, labels, outputs=outputs)
    values, wanted = logits * deviation + mean, raw[labels]
    assert found.accuracy == pytest.approx(100 * float(metrics.r2_score(values, wanted)), rel=1e-5)
    assert found.others["rmse"] == pytest.approx(
        float(metrics.mean_squared_error(values, wanted, squared=False)), rel=1e-5
    )
    assert found.others["mae"] == pytest.approx(float(metrics.mean_absolute_error(values, wanted)), rel=1e-5)


def test_unreadable_images_do_not_count(several: tuple[torch.Tensor, ...]) -> None:
    logits, labels, table = several
    loss = Loss("bce", targets=table)
    more = torch.cat([logits, torch.full((3, OUTPUTS), 9.0)]), torch.cat([labels, torch.full((3,), IGNORE_LABEL)])
    assert score(loss, *more) == score(loss, logits, labels)


def test_number_that_is_the_same_in_all_images_has_no_r2() -> None:
    table = torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    labels = torch.tensor([0, 1] * 20)
    outputs = OutputScale(mean=(0.0, 0.0), deviation=(1.0, 1.0))
    found = score(Loss("mse", targets=table), table[labels] + 0.1, labels, outputs=outputs)
    assert found.class_accuracy == (pytest.approx(96, abs=0.1), None)
    assert found.accuracy == found.class_accuracy[0]
