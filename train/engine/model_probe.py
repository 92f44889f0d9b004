"""Program that builds a model, loads its weights and says how that went: `train.planning.model_report` starts it."""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec
import torch

from entrypoint.core.errors import UserError
from train.engine.optimizer import build_optimizer
from train.models.freezing import freeze
from train.models.head import head_names
from train.models.registry import build_model
from train.models.weights import PRETRAINED, load_weights, published_normalization
from train.models.weights_origin import find_weights_file, read_origin
from train.planning.model_report import ModelQuestion, ModelReport
from train.settings import TrainSettings, read_train_settings

BYTE = 255


def report_on(question: ModelQuestion) -> ModelReport:
    """Return what becomes of the model; raises `UserError`."""
    settings = read_train_settings(question.variables, {}).values
    model = build_model(settings, question.shape, len(question.classes))
    text = ""
    if settings.weights:
        fitted = load_weights(settings, model, question.shape, question.classes)
        fitted.load_into(model)
        text = fitted.describe()
    parameters = sum(one.numel() for one in model.parameters() if one.requires_grad)
    trainable = freeze(model, settings.freeze, len(question.classes))
    build_optimizer(settings, model, head_names(model, len(question.classes)))
    return ModelReport(
        weights=text, normalization=weights_normalization(settings), parameters=parameters, trainable=trainable
    )


def weights_normalization(settings: TrainSettings) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the normalization of the weights' own training: a run's, or that of the model's library."""
    if not settings.weights:
        return None
    if settings.weights != PRETRAINED and (own := read_origin(find_weights_file(settings.weights)).normalization):
        return tuple(one / BYTE for one in own.mean), tuple(1 / (one * BYTE) for one in own.scale)
    return published_normalization(settings.model)


def main() -> None:
    """Read a question from standard input and write the report as the last line of standard output."""
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelQuestion)
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):  # a user's module may print
        try:
            report = report_on(question)
        except UserError as error:
            report = ModelReport(error=str(error), code=int(error.code))
    sys.stdout.flush()
    os.write(1, b"\n" + msgspec.json.encode(report))


if __name__ == "__main__":
    main()
