"""Evaluate a trained model over the ranks of a plan, without training: `entrypoint evaluate`."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace as replace_fields

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import AveragedModel, update_bn

from entrypoint.core.console import RESULT_VAR, write_stdout
from entrypoint.core.errors import UserError, count_text, one_line, printable
from entrypoint.core.files import atomic_path
from entrypoint.plan.model import Plan
from train.acceleration.amp import set_memory_format
from train.checkpoint.tensor_files import write_tensors
from train.data.datasets import DataSet
from train.data.feeds.batches import IGNORE_LABEL, BatchSource
from train.data.feeds.choose import as_learned, build_source, raw_table
from train.data.feeds.loader import BatchLoader
from train.data.sources.targets import Targets
from train.distributed.process_group import ProcessGroup
from train.evaluation.evaluate import evaluate, evaluation_values
from train.evaluation.load_model import load_model
from train.evaluation.results import EvalMethod, EvalResult
from train.models.freezing import freeze
from train.models.inspection import head_names
from train.models.pruning import same_shapes
from train.models.registry import check_other_size
from train.models.weights_origin import origin_header, read_origin
from train.optimization.losses import Loss, evaluation_loss, loss_name
from train.planning.export_formats import INT8_FILE
from train.planning.image_sizes import image_sizes, model_input_shape
from train.planning.trained_run import LISTED_CLASSES, TrainedRun, average_file, read_trained_run
from train.report.metrics import disk_errors_as_user_errors
from train.settings import TrainSettings
from train.transforms.normalize import Normalize, resize_batch, resize_batches


def evaluate_trained(
    settings: TrainSettings, plan: Plan, data: DataSet, loader: BatchLoader | None, group: ProcessGroup
) -> None:
    """Evaluate the model that TRAIN_EVALUATE names, and print the result on rank 0.

    Every rank reads the weights. Raises `UserError` for images of classes that the model does not know.
    """
    trained = read_trained_run(settings.run.evaluate, "TRAIN_EVALUATE", settings.network.model)
    check_shape(trained, settings, data)
    order = torch.tensor(trained.order_of(data.classes, "TRAIN_DATA_DIR"))
    source = build_source(data, loader, settings, group)
    source.normalize = Normalize.from_metadata(trained.normalization, group.device, source.normalize.layout)
    table = known_targets(data.targets, order, trained)
    loss = evaluation_loss(Loss(loss_name(settings), targets=None if table is None else table.to(group.device)))
    model = average(trained, settings, source) if settings.run.average else load_model(trained, settings)
    sizes = image_sizes(settings.data, data.shape)
    check_other_size(settings, model, sizes.other_shapes, len(trained.classes))
    model = set_memory_format(model.to(group.device), channels_last=settings.compute.channels_last)
    outputs = trained.normalization.outputs
    if settings.run.threshold not in ("auto", trained.settings.run.threshold):
        outputs = replace(outputs, threshold=settings.run.threshold)
    method = EvalMethod(
        plan.the_trainer().precision, len(trained.classes), settings.run.test_time_augment, loss, outputs
    )

    def score_of(network: nn.Module) -> EvalResult:
        """Return the result of the trained model, or of another in its place."""
        batches = source.test_batches()
        if table is None:
            batches = renumber(batches, order.to(group.device))
        result = evaluate(network, resize_batches(batches, sizes.eval), group, method)
        assert result is not None, "nothing asks it to stop"
        return result

    score = score_of(model)
    skipped = len(set(data.skipped).union(*group.gather(source.skipped, set[str])))
    if not group.is_main:
        return
    weights = average_file(trained) if settings.run.average else trained.weights
    trained = replace_fields(trained, weights=weights)
    if os.environ.get(RESULT_VAR):
        print_json(trained, score)
    else:
        print_result(trained, score, skipped)
    if settings.run.max_loss is not None:
        from train.evaluation.exports import Exported  # late: few evaluations quantize
        from train.evaluation.quantize import quantize  # its packages are an extra

        normalize = replace_fields(source.normalize, outputs=outputs)
        exported = Exported.of(model, normalize, data.shape, settings.data, trained.classes)
        quantize(
            exported,
            resize_batch(source.sample(), sizes.eval),
            lambda network: score_of(network).accuracy,
            score.accuracy - settings.run.max_loss,
            weights.parent / INT8_FILE,
        )


def check_shape(trained: TrainedRun, settings: TrainSettings, data: DataSet) -> None:
    """Raise `UserError` for images of another shape than the model's."""
    found, trained_on = (
        model_input_shape(settings.data, data.shape),
        model_input_shape(trained.settings.data, trained.shape),
    )
    if found != trained_on:
        own, wanted = ("x".join(map(str, one)) for one in (found, trained_on))
        if settings.data.image_size != trained.settings.data.image_size and settings.data.reads_files:
            raise UserError(
                f"TRAIN_IMAGE_SIZE={settings.data.image_size}: the model was trained on {wanted}. Unset it, or set"
                " TRAIN_EVAL_SIZE to evaluate at another size."
            )
        raise UserError(
            f"TRAIN_DATASET: its images have {own}, and the model was trained on {wanted}. Name other data."
        )


def known_targets(targets: Targets | None, order: Tensor, trained: TrainedRun) -> Tensor | None:
    """Return the targets with a column for each output of the model, 0 for labels that the data do not name.

    Raises `UserError` for data without a number that the model gives.
    """
    if targets is None:
        return None
    outputs, missing = trained.normalization.outputs, set(range(len(trained.classes))) - set(order.tolist())
    if outputs.mean and missing:
        name = printable(trained.classes[min(missing)])
        raise UserError(f"TRAIN_DATA_DIR: has no column {name}, which the model gives. Add it.")
    raw = raw_table(targets)
    whole = raw.new_zeros(len(raw), len(trained.classes))
    whole[:, order] = raw
    return as_learned(whole, outputs)


def renumber(batches: Iterator[tuple[Tensor, Tensor]], numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches with the model's numbers of the classes; unreadable images keep IGNORE_LABEL."""
    for images, labels in batches:
        yield images, torch.where(labels != IGNORE_LABEL, numbers[labels.clamp(min=0)], labels)


def print_result(trained: TrainedRun, score: EvalResult, skipped: int) -> None:
    """Print accuracy and loss, and the classes with the lowest accuracy."""
    top5 = f" (top 5: {score.top5:.2f} %)" if score.top5 else ""
    pairs = zip(trained.classes, score.class_accuracy, strict=True)
    worst = sorted((share, name) for name, share in pairs if share is not None)[:LISTED_CLASSES]
    width = max((len(one_line(known)) for _, known in worst), default=0)
    name = trained.settings.data.score
    lines = (
        f"{name:9} {score.accuracy:.2f} %{top5} of {score.images:,} images",
        *(f"{key:9} {value:.4g}" for key, value in score.others.items()),
        f"loss      {score.loss:.4f}",
        f"weights   {one_line(trained.weights)}",
        *((f"left out  {count_text(skipped, 'unreadable image')}",) if skipped else ()),
        *((f"classes   lowest {name} first",) if worst else ()),
        *(f"  {one_line(known):{width}}  {share:6.2f} %" for share, known in worst),
    )
    with suppress(BrokenPipeError):
        write_stdout("\n".join(lines))


def print_json(trained: TrainedRun, score: EvalResult) -> None:
    """Print the result as JSON, with the confusion matrix."""
    values = {**evaluation_values(score, trained.classes, trained.settings.data.score), "weights": str(trained.weights)}
    with suppress(BrokenPipeError):
        write_stdout(json.dumps(values, allow_nan=False))


def average(trained: TrainedRun, settings: TrainSettings, source: BatchSource) -> nn.Module:
    """Return the mean of the models that TRAIN_AVERAGE names, and write it next to the trained one.

    The statistics of BatchNorm are those of an epoch of training images, since the mean of several is no statistic of
    any images. Frozen ones stay. Raises `UserError` for weights that do not fit, and for a disk.
    """
    models = (
        load_model(read_trained_run(path, "TRAIN_AVERAGE", settings.network.model), trained.settings)
        for path in settings.run.average.split(",")
    )
    averaged = AveragedModel(next(models))
    averaged.update_parameters(averaged.module)
    for model in models:
        if not same_shapes(averaged.module, model.state_dict()):
            raise UserError(
                "TRAIN_AVERAGE: the models differ in sizes of layers. Name some of one input size and pruning."
            )
        averaged.update_parameters(model)
    network: nn.Module = averaged.module.to(source.group.device)
    freeze(network, trained.settings.network.freeze, head_names(network, len(trained.classes)))
    frozen = [module for module in network.train().modules() if isinstance(module, _BatchNorm) and not module.training]
    kept = [copy.deepcopy(module.state_dict()) for module in frozen]
    update_bn((images for batch in source.train_batches(0) for images, _ in batch.micro_batches), network)
    for module, state in zip(frozen, kept, strict=True):
        module.load_state_dict(state)
    tensors, path = {name: value.cpu() for name, value in network.state_dict().items()}, average_file(trained)
    with disk_errors_as_user_errors(path), atomic_path(path) as temporary:
        write_tensors(temporary, tensors, origin_header(read_origin(trained.weights)))
    return network.eval()
