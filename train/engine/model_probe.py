"""Program that builds a model, loads its weights and says how that went: `train.planning.model_report` starts it."""

from __future__ import annotations

import contextlib
import os
import sys

import msgspec
import torch
from torch import nn

from entrypoint.core.errors import UserError, first_line, one_line, printable
from train.acceleration.activation_checkpointing import checkpoint_activations
from train.engine.optimizer import arguments_error, build_optimizer
from train.models.factory import describe_failure
from train.models.freezing import freeze
from train.models.head import head_names
from train.models.inspection import count_parameters
from train.models.registry import build_model, check_other_size
from train.models.weights import PRETRAINED, load_weights, published_normalization
from train.models.weights_origin import find_weights_file, read_origin
from train.planning.model_report import ModelQuestion, ModelReport, original
from train.settings import ImageShape, TrainSettings, read_train_settings

BYTE = 255
# Batches whose difference is what one image more costs.
FEW_IMAGES = (2, 4)


def report_on(question: ModelQuestion) -> ModelReport:
    """Return what becomes of the model; raises `UserError`."""
    variables = {name: original(value) for name, value in question.variables.items()}
    classes = tuple(map(original, question.classes))
    settings = read_train_settings(variables, {}).values
    model = build_model(settings, question.shape, len(classes))
    check_other_size(settings, model, question.other_shapes, len(classes))
    text = ""
    if settings.weights:
        fitted = load_weights(settings, model, question.shape, classes)
        fitted.load_into(model)
        text = fitted.describe()
    parameters, head = count_parameters(model), head_names(model, len(classes))
    trainable = freeze(model, settings.freeze, head)
    optimizer = build_optimizer(settings, model, head)
    without = try_training(settings, model, question.shape) if settings.is_own_model else ()
    try_step(settings, optimizer)
    per_image = fixed = 0
    if settings.grad_accum_steps == "auto":
        per_image, fixed = bytes_per_image(settings, model, question.shape), fixed_bytes(settings, model, optimizer)
    return ModelReport(
        weights=one_line(text),
        normalization=weights_normalization(settings),
        parameters=parameters,
        trainable=trainable,
        without_gradient=without,
        bytes_per_image=per_image,
        fixed_bytes=fixed,
    )


def bytes_per_image(settings: TrainSettings, model: nn.Module, shape: ImageShape) -> int:
    """Return the bytes that one more image of a batch keeps until the backward pass, and its own floats.

    bf16 and fp16 are measured as bf16, which the CPU computes too.
    """
    if settings.activation_checkpointing:
        checkpoint_activations(model)
    counts = [kept_bytes(settings, model, shape, images) for images in FEW_IMAGES]
    image = 4 * shape[0] * shape[1] * shape[2]
    return image + max(0, counts[1] - counts[0]) // (FEW_IMAGES[1] - FEW_IMAGES[0])


def kept_bytes(settings: TrainSettings, model: nn.Module, shape: ImageShape, images: int) -> int:
    """Return the bytes of all tensors that a forward pass of some images keeps, each memory once."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.train()
    halved = settings.precision in ("bf16", "fp16", "fp8")
    with (
        torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=halved),
    ):
        logits = model(torch.randn(images, *shape))
    total = sum(kept.values())
    del logits
    return total


def fixed_bytes(settings: TrainSettings, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of weights, gradients, what the optimizer keeps after a step, and the EMA."""
    weights = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
    gradients = sum(one.nbytes for one in model.parameters() if one.requires_grad)
    states = (one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor))
    average = weights if settings.ema_decay else 0
    return weights + gradients + sum(one.nbytes for one in states) + average


def try_training(settings: TrainSettings, model: nn.Module, shape: ImageShape) -> tuple[str, ...]:
    """Return the trained parameters that get no gradient from two random images.

    Raises `UserError` if the model cannot be trained: it may differ from what it is in evaluation.
    """
    source = f"TRAIN_MODEL={printable(settings.model)}"
    model.train()
    model.zero_grad()
    try:
        logits = model(torch.randn(2, *shape, generator=torch.Generator().manual_seed(0)))
    except Exception as error:  # the user's own model may raise anything
        raise UserError(f"{source}: in training the model {describe_failure(error)}. Correct it.") from None
    if not isinstance(logits, torch.Tensor):
        raise UserError(
            f"{source}: in training the model returns {type(logits).__name__} and not a tensor of logits. Return the"
            " logits alone."
        )
    if not logits.requires_grad:
        raise UserError(f"{source}: the logits have no gradient, so nothing is trained. Compute them without no_grad.")
    try:
        logits.float().square().mean().backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UserError(f"{source}: the backward pass fails ({first_line(error)}). Correct the model.") from None
    return tuple(name for name, one in model.named_parameters() if one.requires_grad and one.grad is None)


def try_step(settings: TrainSettings, optimizer: torch.optim.Optimizer) -> None:
    """Take a step with gradients of 0; raises `UserError` for arguments that only a step refuses."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    try:
        optimizer.step()
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise arguments_error(settings, type(optimizer).__name__, error) from None


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
            report = ModelReport(error=one_line(error), code=int(error.code))
    sys.stdout.flush()
    os.write(1, b"\n" + msgspec.json.encode(report))


if __name__ == "__main__":
    main()
