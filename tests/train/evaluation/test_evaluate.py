"""Evaluation against torchmetrics as the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from entrypoint.core.errors import ExitCode
from tests.conftest import refusal
from train.data.feeds.batches import IGNORE_LABEL
from train.distributed.process_group import ProcessGroup
from train.evaluation.evaluate import evaluate
from train.evaluation.results import EvalMethod
from train.seeding import make_generator

ALONE = ProcessGroup(0, 1, 0, torch.device("cpu"))


@pytest.mark.seconds
def test_evaluate_equals_torchmetrics_and_torch() -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    x = torch.randn(103, 1, 4, 4, generator=make_generator("x"))
    y = torch.randint(0, 5, (103,), generator=make_generator("y"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    score = evaluate(model, [(x[:50], y[:50]), (x[50:51], y[50:51]), (x[51:], y[51:])], ALONE)
    oracle = metrics.MulticlassAccuracy(num_classes=5, average="micro")
    with torch.no_grad():
        logits = model(x)
    assert score.images == 103
    assert score.accuracy == pytest.approx(100 * float(oracle(logits, y)), abs=1e-4)
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(logits, y)), rel=1e-5)


def test_evaluate_ignores_unreadable_images() -> None:
    model = nn.Flatten()
    x = torch.eye(4).view(4, 4, 1, 1)
    score = evaluate(model, [(x, torch.tensor([0, 1, IGNORE_LABEL, 0]))], ALONE)
    assert score.images == 3
    assert score.accuracy == pytest.approx(200 / 3)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(2, 4), torch.full((2,), IGNORE_LABEL))]])
def test_evaluate_without_any_image_is_an_error(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    refusal(
        evaluate,
        nn.Sequential(nn.Dropout()),
        batches,
        ALONE,
        match="no test image can be read any more",
        code=ExitCode.RANK_FAILED,
    )


@pytest.mark.parametrize("classes", [7, 1500])
def test_details_equal_torchmetrics(classes: int) -> None:
    metrics = pytest.importorskip("torchmetrics.classification")
    logits = torch.randn(400, classes, generator=make_generator("x"))
    labels = torch.randint(0, classes, (400,), generator=make_generator("y"))
    logits[torch.arange(200), labels[:200]] += 2
    known = labels.clone()
    labels[5] = IGNORE_LABEL
    score = evaluate(
        nn.Identity(), [(logits[:150], labels[:150]), (logits[150:], labels[150:])], ALONE, EvalMethod(classes=classes)
    )
    kept = torch.arange(400) != 5
    logits, known = logits[kept], known[kept]
    top5 = metrics.MulticlassAccuracy(num_classes=classes, average="micro", top_k=5)
    assert score.top5 == pytest.approx(100 * float(top5(logits, known)), abs=1e-4)
    by_class = metrics.MulticlassAccuracy(num_classes=classes, average="none")(logits, known)
    assert len(score.class_accuracy) == classes
    for index, share in enumerate(score.class_accuracy):
        assert (share is None) == (index not in known)
        assert share is None or share == pytest.approx(100 * float(by_class[index]), abs=1e-3)
    if classes <= 1000:
        matrix = metrics.MulticlassConfusionMatrix(num_classes=classes)(logits, known)
        assert [list(row) for row in score.confusion] == matrix.tolist()
    else:
        assert score.confusion == ()


@pytest.mark.parametrize(("images", "chosen"), [(300, 4.0), (199, 1.0)])
def test_enough_images_choose_a_temperature(images: int, chosen: float) -> None:
    logits = 20 * torch.randn(images, 4, generator=make_generator("x"))
    labels = torch.randint(0, 4, (images,), generator=make_generator("y"))
    method = EvalMethod(classes=4, chooses=True)
    score = evaluate(nn.Identity(), [(logits, labels)], ALONE, method)
    assert score.others["temperature"] == chosen
    assert score.others["ece"] == pytest.approx(75, abs=10)
