"""Program that builds a model, loads its weights and says how that went: `train.planning.model_report` starts it."""

from __future__ import annotations

import json

import msgspec
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from entrypoint.core.errors import ExitCode, UserError, first_line, one_line, printable, refuse_if
from train.acceleration.amp import set_memory_format
from train.child import answer
from train.models.freezing import freeze
from train.models.inspection import count_parameters, head_names, single_image_problem
from train.models.pruning import prune_state
from train.models.registry import build_model, check_other_size
from train.models.users_code import describe_failure
from train.models.weights import load_weights, published_normalization
from train.models.weights_origin import PRETRAINED, find_weights_file, read_origin
from train.optimization.optimizer import (
    argument_defaults,
    arguments_error,
    build_optimizer,
    default_lr,
    find_optimizer,
)
from train.planning.model_report import ModelQuestion, ModelReport
from train.setting_groups.network import OWN_MODELS, NetworkSettings
from train.setting_groups.optimization import OptimizationSettings
from train.settings import ImageShape, TrainSettings, read_train_settings

BYTE = 255
# Bytes of a weight: they are fp32 with every precision.
WEIGHT_BYTES = 4
# RAdam and others use an argument from the sixth step on.
TRIAL_STEPS, SMALL_GRADIENT = 7, 1e-3
# Tensors of the weights' size that an optimizer keeps; others are taken to keep one.
OPTIMIZER_STATES = {"sgd": 1, "adam": 2, "adamw": 2}


def report_on(question: ModelQuestion) -> ModelReport:
    """Return what becomes of the model; raises `UserError`."""
    settings = read_train_settings(question.variables, {}).values
    classes = question.classes
    check_memory(settings, question.shape, len(classes), question.memory_bytes)
    model = build_model(settings.network, question.shape, len(classes))
    if settings.network.prune_ratio:
        slim = build_model(settings.network, question.shape, len(classes))
        prune_state(slim, model.state_dict(), question.shape, settings.network)
    check_other_size(settings, model, question.other_shapes, len(classes))
    text = ""
    if settings.network.weights:
        fitted = load_weights(settings.network, model, question.shape, classes)
        fitted.load_into(model)
        text = fitted.describe()
    parameters, head = count_parameters(model), head_names(model, len(classes))
    trainable = freeze(model, settings.network.freeze, head)
    optimizer = build_optimizer(settings, model, head)
    is_own = settings.network.is_own_model
    if is_own:
        check_state(settings.network, model)
    needs_contiguous = is_own and settings.compute.channels_last and views_contiguous(model, question.shape)
    without = try_training(settings.network, model, question.shape) if is_own else ()
    try_step(settings.optim, optimizer)
    problems = (single_image_problem(model, shape) for shape in question.single_shapes)
    kind = find_optimizer(settings.optim)
    return ModelReport(
        weights=one_line(text),
        normalization=weights_normalization(settings.network),
        parameters=parameters,
        batchnorm_layers=sum(isinstance(module, _BatchNorm) for module in model.modules()),
        trainable=trainable,
        without_gradient=without,
        needs_contiguous=needs_contiguous,
        single_image_problem=next(filter(None, problems), ""),
        default_lr=default_lr(settings.optim, kind),
        has_weight_decay="weight_decay" in argument_defaults(kind),
    )


def check_memory(settings: TrainSettings, shape: ImageShape, classes: int, memory_bytes: int) -> None:
    """Raise `UserError` for a network of ours whose weights do not fit into the memory of a rank, 0 if unknown.

    The size of the images decides on it. Other networks pool.
    """
    if not memory_bytes or settings.network.model not in OWN_MODELS:
        return
    with torch.device("meta"):
        model = build_model(settings.network, shape, classes)
    count = sum(parameter.numel() for parameter in model.parameters())
    copies = 1
    if settings.compute.parallelism == "ddp":  # gradients, the optimizer's states and the EMA; FSDP shards them
        copies += 1 + OPTIMIZER_STATES.get(settings.optim.optimizer.lower(), 1) + (settings.network.ema_decay > 0)
    needed = WEIGHT_BYTES * count * copies
    if needed > memory_bytes:
        raise UserError(
            f"TRAIN_MODEL={settings.network.model}: has {count:,} weights for {'x'.join(map(str, shape))} images, which"
            f" take {needed / 2**30:,.1f} GiB, and a rank has {memory_bytes / 2**30:,.1f} GiB. Take another model, or"
            " smaller images.",
            ExitCode.MACHINE,
        )


def check_state(settings: NetworkSettings, model: nn.Module) -> None:
    """Raise `UserError` for a value of the model's state that no safetensors file holds, before a checkpoint is due."""
    for name, value in model.state_dict().items():
        is_dense = isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized
        if not is_dense:
            kind = f"a tensor of layout {value.layout}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise UserError(
                f"TRAIN_MODEL={printable(settings.model)}: {printable(name)} of its state is {printable(kind)}, which a"
                " checkpoint cannot hold. Make it a dense tensor, or keep it out by register_buffer(persistent=False)."
            )


def views_contiguous(model: nn.Module, shape: ImageShape) -> bool:
    """Return whether the model has a `view` that the channels-last memory format does not allow."""
    images = torch.zeros(2, *shape).contiguous(memory_format=torch.channels_last)
    try:
        with torch.no_grad():
            set_memory_format(model, channels_last=True).train()(images)
    except Exception as error:  # another error comes without this format too, and is reported then
        return "view size is not compatible" in str(error)
    finally:
        set_memory_format(model, channels_last=False)
    return False


def try_training(settings: NetworkSettings, model: nn.Module, shape: ImageShape) -> tuple[str, ...]:
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
    is_tensor = isinstance(logits, torch.Tensor)
    refuse_if(
        {
            f"{source}: in training the model returns {type(logits).__name__} and not a tensor of logits. Return the"
            " logits alone.": not is_tensor,
            f"{source}: the logits have no gradient, so nothing is trained. Compute them without no_grad.": (
                is_tensor and not logits.requires_grad
            ),
        }
    )
    try:
        logits.float().square().mean().backward()
    except RuntimeError as error:
        raise UserError(f"{source}: the backward pass fails ({first_line(error)}). Correct the model.") from None
    return tuple(name for name, one in model.named_parameters() if one.requires_grad and one.grad is None)


def try_step(settings: OptimizationSettings, optimizer: torch.optim.Optimizer) -> None:
    """Take some steps; raises `UserError` for arguments that only a step refuses, of some optimizers a later one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, SMALL_GRADIENT)
    try:
        for _ in range(TRIAL_STEPS):
            optimizer.step()
    except Exception as error:  # optimizers raise what their arithmetic raises
        raise arguments_error(settings, type(optimizer).__name__, error) from None


def weights_normalization(settings: NetworkSettings) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """Return the normalization of the weights' own training: a run's, or that of the model's library."""
    if not settings.weights:
        return None
    if settings.weights != PRETRAINED and (own := read_origin(find_weights_file(settings.weights)).normalization):
        return tuple(one / BYTE for one in own.mean), tuple(1 / (one * BYTE) for one in own.scale)
    return published_normalization(settings.model)


def report(question: bytes) -> ModelReport:
    """Return what becomes of the model that a question names, or why it cannot be used."""
    torch.set_num_threads(1)
    try:
        return report_on(msgspec.convert(json.loads(question), type=ModelQuestion))
    except UserError as error:
        return ModelReport(error=one_line(error), code=int(error.code))


if __name__ == "__main__":
    answer(report)
