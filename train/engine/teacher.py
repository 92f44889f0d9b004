"""Distillation: a run also learns the answers of a trained model, its teacher (arXiv:1503.02531)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from train.acceleration.amp import set_memory_format
from train.data.feeds.batches import IGNORE_LABEL
from train.evaluation.load_model import load_model
from train.planning.image_sizes import model_input_shape
from train.planning.trained_run import read_trained_run
from train.settings import ImageShape, TrainSettings
from train.transforms.batch_tensors import resize_batch
from train.transforms.normalize import Normalize

# Softens the answers, so that those of unlikely classes count too. The loss is scaled by it, and in the paper by its
# square: here its gradient is at most cross entropy's, and the default learning rate holds.
TEMPERATURE = 2.0


@dataclass(frozen=True)
class Teacher:
    """A trained model; `order` has its output of each class of the run.

    `factor` and `offset` turn images that the run has normalized into images of `shape` that the teacher normalizes.
    """

    model: nn.Module
    order: Tensor
    shape: ImageShape
    factor: Tensor
    offset: Tensor

    def loss(self, images: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum over a batch of how far (N, classes) logits are from the teacher's answers.

        Images with IGNORE_LABEL add nothing.
        """
        with torch.no_grad():
            answers = self.model(resize_batch(images * self.factor + self.offset, self.shape))[:, self.order]
        wanted, learned = ((one.float() / TEMPERATURE).log_softmax(1) for one in (answers, logits))
        each = kl_div(learned, wanted, reduction="none", log_target=True).sum(1)
        return torch.where(labels != IGNORE_LABEL, each, 0).sum() * TEMPERATURE


def load_teacher(settings: TrainSettings, classes: Sequence[str], normalize: Normalize) -> Teacher | None:
    """Return the teacher of a run, on the device of its images; raises `UserError` for one that does not fit."""
    if not settings.teacher or settings.task != "classify":
        return None
    trained, device = read_trained_run(settings.teacher, "TRAIN_TEACHER", settings.model), normalize.mean.device
    with torch.random.fork_rng(devices=[]):
        model = load_model(trained, trained.settings).requires_grad_(requires_grad=False)
    theirs = Normalize.from_metadata(trained.normalization, device, normalize.layout)
    return Teacher(
        set_memory_format(model.to(device), channels_last=settings.channels_last),
        torch.tensor(trained.order_of(classes, "TRAIN_TEACHER"), device=device),
        model_input_shape(trained.settings, trained.shape),
        theirs.scale / normalize.scale,
        (normalize.mean - theirs.mean) * theirs.scale,
    )
