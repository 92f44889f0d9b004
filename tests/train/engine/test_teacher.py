"""Distillation: a run that learns the answers of another one."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from tests.conftest import Entrypoint, needs_two_cores
from tests.train.given import TWO_RANKS
from train.data.feeds.batches import IGNORE_LABEL
from train.engine.train_step import TEMPERATURE, Teacher

DIGITS = {"TRAIN_DATASET": "digits", "LAUNCH_QUIET": "1", "TRAIN_TENSORBOARD": "0", "TRAIN_EPOCHS": "3"}
TAUGHT = DIGITS | {"TRAIN_TEACHER": "runs/teacher", "TRAIN_RUN_NAME": "taught"}


def test_loss_is_the_divergence_from_the_teachers_answers() -> None:
    random = torch.Generator().manual_seed(0)
    raw, logits = torch.rand(5, 3, 4, 4, generator=random) * 255, torch.randn(5, 2, generator=random)
    labels = torch.tensor([0, 1, IGNORE_LABEL, 1, 0])
    network = nn.Sequential(nn.Flatten(), nn.Linear(48, 3))
    mean, scale, its_mean, its_scale = 100.0, 0.02, 90.0, 0.01
    teacher = Teacher(
        network,
        torch.tensor([2, 0]),
        (3, 4, 4),
        torch.tensor(its_scale / scale),
        torch.tensor((mean - its_mean) * its_scale),
    )
    answers = network((raw - its_mean) * its_scale)[:, [2, 0]]
    known = labels != IGNORE_LABEL
    expected = nn.KLDivLoss(reduction="sum")(
        (logits[known] / TEMPERATURE).log_softmax(1), (answers[known] / TEMPERATURE).softmax(1)
    )
    found = teacher.loss((raw - mean) * scale, logits, labels)
    torch.testing.assert_close(found, expected * TEMPERATURE, rtol=1e-4, atol=1e-5)
    assert not found.requires_grad


@pytest.mark.launch
@needs_two_cores
def test_ranks_and_resumption_learn_the_same_of_a_teacher(entrypoint: Entrypoint) -> None:
    entrypoint.train(env=DIGITS | {"TRAIN_RUN_NAME": "teacher", "TRAIN_EPOCHS": "6"})
    alone = entrypoint.train(env=DIGITS | {"TRAIN_RUN_NAME": "alone"})
    taught = entrypoint.train("--keep-checkpoints=9", env=TAUGHT)
    assert taught["weights_sha256"] != alone["weights_sha256"]
    two = entrypoint.train(env=TAUGHT | TWO_RANKS | {"TRAIN_RUN_NAME": "two"})
    assert two["test_accuracy"] == pytest.approx(taught["test_accuracy"], abs=0.6)
    entrypoint.cut("taught")
    runs = entrypoint.folder / "runs"
    (runs / "teacher").rename(runs / "kept")
    (runs / "alone").rename(runs / "teacher")
    other = entrypoint.error_line("train", "--resume=auto", env=TAUGHT)
    assert "saved with other data: the teacher has other weights" in other
    shutil.rmtree(runs / "teacher")
    (runs / "kept").rename(runs / "teacher")
    again = entrypoint.train("--resume=auto", env=TAUGHT)
    assert again["weights_sha256"] == taught["weights_sha256"]
    pruned = entrypoint.train("--prune-ratio=0.5", "--prune-warmup=1", env=TAUGHT | {"TRAIN_RUN_NAME": "pruned"})
    assert pruned["parameters"] < taught["parameters"] / 2


@pytest.mark.launch
@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"TRAIN_TEACHER": "runs/nobody"}, "TRAIN_TEACHER=runs/nobody: "),
        (
            {"TRAIN_DATASET": "fashion-mnist"},
            "TRAIN_TEACHER=runs/teacher: the model knows no class T-shirt/top; it",
        ),
        ({"TRAIN_DATASET": "cifar10"}, "TRAIN_TEACHER=runs/teacher: the model knows no class airplane"),
    ],
)
def test_teacher_that_does_not_fit_is_refused_by_the_plan(
    entrypoint: Entrypoint, env: dict[str, str], said: str
) -> None:
    entrypoint.train(env=DIGITS | {"TRAIN_RUN_NAME": "teacher", "TRAIN_EPOCHS": "1"})
    for command in ("plan", "train"):
        assert said in entrypoint.error_line(command, *(["train"] if command == "plan" else []), env=TAUGHT | env)


@pytest.mark.launch
def test_teacher_of_another_task_or_not_finite_is_refused(entrypoint: Entrypoint) -> None:
    entrypoint.train(env=DIGITS | {"TRAIN_RUN_NAME": "teacher", "TRAIN_EPOCHS": "1"})
    path = entrypoint.folder / "runs/teacher/model.safetensors"
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] * torch.nan}, path, header)
    assert f"{path.relative_to(entrypoint.folder)}: {name} is not finite" in entrypoint.error_line("train", env=TAUGHT)
    origin = json.loads(header["reference_training"])
    origin["settings"]["task"] = "multilabel"
    save_file(tensors, path, header | {"reference_training": json.dumps(origin)})
    assert "TRAIN_TEACHER=runs/teacher: was trained for multilabel, which has no classes" in entrypoint.error_line(
        "plan", "train", env=TAUGHT
    )


@pytest.mark.launch
def test_run_of_skipped_steps_alone_fails(entrypoint: Entrypoint) -> None:
    (entrypoint.folder / "net.py").write_text(
        "from torch import nan, nn\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) * (nan if self.training else 1)\n"
        "def build(num_classes):\n"
        "    return Net(nn.Flatten(), nn.Linear(64, num_classes))\n"
    )
    broken = DIGITS | {"TRAIN_MODEL": "net:build", "TRAIN_SKIP_NONFINITE": "1000"}
    result = entrypoint("train", env=broken)
    assert result.code == 5
    assert "each step was skipped" in result.err.splitlines()[-1]
