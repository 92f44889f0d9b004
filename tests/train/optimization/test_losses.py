"""Losses and their weights, against torch's own and timm's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.conftest import refusal
from tests.factories import train_settings
from train.data.feeds.batches import IGNORE_LABEL
from train.optimization.losses import Loss, class_weights, evaluation_loss, training_loss

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, 1, 1, IGNORE_LABEL, 0])
TARGETS = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0], [0.5, 2.0, -1.0]])
COUNTED = LABELS != IGNORE_LABEL
WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def test_cross_entropy_is_torchs() -> None:
    expected = nn.CrossEntropyLoss(WEIGHTS, reduction="sum", label_smoothing=0.1)(LOGITS[COUNTED], LABELS[COUNTED])
    torch.testing.assert_close(Loss(smoothing=0.1, weights=WEIGHTS)(LOGITS, LABELS), expected)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_is_timms(smoothing: float) -> None:
    timm = pytest.importorskip("timm.loss", reason="timm cannot be loaded", exc_type=(ImportError, RuntimeError))
    expected = timm.BinaryCrossEntropy(smoothing=smoothing)(LOGITS[COUNTED], LABELS[COUNTED])
    torch.testing.assert_close(Loss("bce", smoothing)(LOGITS, LABELS) / COUNTED.sum(), expected)


def test_focal_loss_of_classes_is_its_formula() -> None:
    likely = LOGITS[COUNTED].softmax(1)[torch.arange(5), LABELS[COUNTED]]
    expected = (-((1 - likely) ** 2) * likely.log() * WEIGHTS[LABELS[COUNTED]]).sum()
    torch.testing.assert_close(Loss("focal", weights=WEIGHTS)(LOGITS, LABELS), expected)


def test_focal_loss_of_labels_is_torchvisions() -> None:
    ops = pytest.importorskip(
        "torchvision.ops", reason="torchvision cannot be loaded", exc_type=(ImportError, RuntimeError)
    )
    wanted = TARGETS.clamp(0, 1).round()
    expected = ops.sigmoid_focal_loss(LOGITS[COUNTED], wanted[LABELS[COUNTED]], alpha=-1).mean(1).sum()
    torch.testing.assert_close(Loss("focal", targets=wanted)(LOGITS, LABELS), expected)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("bce", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
        ("mse", nn.MSELoss()),
        ("mae", nn.L1Loss()),
        ("huber", nn.HuberLoss()),
    ],
)
def test_losses_of_targets_are_torchs(name: str, module: nn.Module) -> None:
    weights = WEIGHTS if name == "bce" else None
    loss = Loss(name, weights=weights, targets=TARGETS)
    torch.testing.assert_close(loss(LOGITS, LABELS) / COUNTED.sum(), module(LOGITS[COUNTED], TARGETS[LABELS[COUNTED]]))
    assert loss(LOGITS, torch.full_like(LABELS, IGNORE_LABEL)) == 0


@pytest.mark.parametrize(("task", "name"), [("classify", "cross_entropy"), ("multilabel", "bce"), ("regress", "huber")])
def test_each_task_has_a_loss(task: str, name: str) -> None:
    table = None if task == "classify" else TARGETS
    loss = training_loss(train_settings(task=task, label_smoothing=0.1), "abc", torch.ones(3), table)
    assert (loss.name, loss.weights) == (name, None)
    assert list(vars(evaluation_loss(loss)).values()) == [name, 0, None, table]


def test_evaluation_reports_a_loss_that_no_weight_changes() -> None:
    assert evaluation_loss(Loss("focal", 0.1, WEIGHTS)) == Loss()
    assert list(vars(evaluation_loss(Loss("focal", 0.1, WEIGHTS, TARGETS))).values()) == ["bce", 0, None, TARGETS]


def test_auto_weights_a_mean_image_with_one() -> None:
    counts = torch.tensor([10, 30, 60])
    weights = class_weights("auto", "abc", counts)
    assert weights.tolist() == pytest.approx([100 / 30, 100 / 90, 100 / 180])
    assert float((weights * counts).sum() / counts.sum()) == pytest.approx(1)
    assert class_weights("b=2,c=.5", "abc", counts).tolist() == [1, 2, 0.5]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=1,a=2", "a is there twice. Leave one out."),
        ("d=2", "there is no class d"),
        ("bee=1", "no class bee"),
        ("balanced", "there is no class balanced. Write auto, or class=weight."),
        ("b=x", "x is no weight"),
        ("b=-1", "is no weight"),
        ("b=1e-300", "Write 0, or from 1e-6 to 1e6"),
        ("b=1e40", "Write 0, or from 1e-6 to 1e6"),
        ("a=0,b=0,c=0", "every weight is 0"),
    ],
)
def test_weights_that_cannot_be_used_are_one_line(text: str, said: str) -> None:
    assert refusal(class_weights, text, "abc", torch.ones(3), match=said).startswith(f"TRAIN_CLASS_WEIGHTS={text}: ")
