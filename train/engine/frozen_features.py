"""Compute the features of a frozen backbone once, where nothing changes the images: then epochs train one layer."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from train.acceleration.amp import autocast
from train.data.datasets import ImageTensors
from train.data.feeds.batches import BatchSource
from train.data.feeds.memory import MemorySource
from train.data.val_split import TEST, TRAIN
from train.distributed.ddp import wrap_ddp
from train.engine.run_setup import TrainingRun
from train.engine.save_policy import save_and_exit
from train.preemption import STOP_CONTROLLER
from train.transforms.augmentations import AUGMENTATIONS
from train.transforms.normalize import Normalize

# Bytes of features that each rank holds at most.
MAX_BYTES = 1 << 30
CHECKED_IMAGES = 8


@dataclass(frozen=True)
class TrainedPart:
    """What epochs compute: the layer of this name on a source of its inputs, or without a name the whole model."""

    source: BatchSource
    layer: str = ""

    def of(self, model: nn.Module) -> nn.Module:
        """Return the module that takes this part's batches."""
        return nn.Sequential(nn.Flatten(), model.get_submodule(self.layer)) if self.layer else model


def choose_trained_part(run: TrainingRun) -> TrainedPart:
    """Return what the epochs of a run compute; features are computed here where that is enough.

    Each rank computes those of its share of the images in batches that never change, so a resumed run has the same
    bits. Raises `Preempted` as training does.
    """
    layer = only_trained_layer(run)
    # Rank 0 decides for all: others may compute with other kernels.
    width = run.group.run_on_main(lambda: feature_width(run, layer), int) if layer else 0
    if not width:
        return TrainedPart(run.source)
    run.progress.print(f"computing the frozen backbone's features once, {width:,} numbers an image")
    began = time.perf_counter()
    trained = compute_features(run, layer, TRAIN, width)
    evaluates_test = not run.source.has_val or run.source.rows.val_is_in == TEST
    others = compute_features(run, layer, TEST, width) if evaluates_test else trained
    if run.group.all_reduce_max_async(int(STOP_CONTROLLER.stop_requested))():
        save_and_exit(run, run.first_epoch)
    run.trainer.state.seconds += time.perf_counter() - began
    device = run.group.device
    unchanged = Normalize(torch.zeros(1, width, 1, 1, device=device), torch.ones(1, width, 1, 1, device=device))
    source = MemorySource(trained, others, run.settings, run.group, unchanged, run.source.rows)
    source.sampler = run.source.sampler  # an image that cannot be read keeps its class for the order
    part = TrainedPart(source, layer)
    run.trainer.ddp_model = wrap_ddp(part.of(run.trainer.state.model), run.settings, run.group)
    run.trainer.compiled_forward = run.trainer.ddp_model
    return part


def only_trained_layer(run: TrainingRun) -> str:
    """Return the name of the one layer that is trained, empty where there are more or its inputs change."""
    settings, trainer, sizes = run.settings, run.trainer, run.model_builder.sizes
    changes_images = (
        run.source.sampler.transform.sample_params
        or any(augmentation.count_draws(settings) for augmentation in AUGMENTATIONS.values())
        or settings.mixup_alpha
        or settings.cutmix_alpha
        or settings.test_time_augment != "off"
        or settings.is_own_dataset
        or trainer.image_shape
        or sizes.eval != sizes.decoded
    )
    needs_images = (
        trainer.teacher
        or trainer.compiler
        or settings.prune_ratio
        or settings.parallelism == "fsdp"
        or run.model_builder.plan.the_trainer().use_ipex
    )
    trained = trainer.state.model.named_parameters()
    layers = {name.rpartition(".")[0] for name, parameter in trained if parameter.requires_grad}
    is_short = run.epochs < 2 or run.first_epoch >= run.epochs
    if not settings.freeze or changes_images or needs_images or len(layers) > 1 or is_short:
        return ""
    return layers.pop()


def first_images(run: TrainingRun, count: int) -> Tensor:
    """Return some of the first training images as they are evaluated, on the device; for rank 0 alone."""
    rows = torch.arange(min(count * run.group.world_size, run.data.train_examples))
    return next(run.source.eval_batches(TRAIN, rows))[0]


def feature_width(run: TrainingRun, layer: str) -> int:
    """Return how many numbers the layer gets of an image, 0 where they change, where more follows, or for too many.

    The layer gets random weights for that, as one of zeros hides what follows.
    """
    model, images = copy.deepcopy(run.trainer.state.model), first_images(run, CHECKED_IMAGES)
    head = model.get_submodule(layer)
    with torch.random.fork_rng(devices=[]), autocast(run.trainer.precision, run.group.device), torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        passes = [inputs_of(model.train(mode), layer, images) for mode in (True, True, False)]
        if any(len(inputs) != 1 or inputs[0] is None or inputs[0].dim() != 2 for inputs, _ in passes):
            return 0
        ((first,), outputs), ((second,), _), ((features,), _) = passes
        fits = torch.equal(first, second) and torch.allclose(first, features, rtol=0.01, atol=0.01)
        is_last = fits and torch.allclose(outputs, head(features), rtol=0.01, atol=0.01)
    needed = 4 * features.shape[1] * (run.data.train_examples + run.data.test_examples)
    return features.shape[1] if is_last and needed <= MAX_BYTES else 0


def inputs_of(model: nn.Module, layer: str, images: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return what a layer gets in a forward pass, each time that it is called, and the outputs."""
    inputs: list[Any] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(
        lambda _, args: inputs.append(args[0] if len(args) == 1 else None)
    )
    outputs = model(images)
    hook.remove()
    return inputs, outputs


def compute_features(run: TrainingRun, layer: str, split: int, width: int) -> ImageTensors:
    """Return the inputs of a layer, (N, 1, 1, width) floats, for all images of a split; none if a signal stops it."""
    model, parts, labels = run.trainer.state.model.eval(), [torch.empty(0, width)], [torch.empty(0, dtype=torch.int64)]
    for images, own_labels in run.source.eval_batches(split, None):
        if STOP_CONTROLLER.stop_requested:
            break
        with autocast(run.trainer.precision, run.group.device), torch.no_grad():
            ((features,), _) = inputs_of(model, layer, images)
        parts.append(features.to("cpu", torch.float32, copy=True))
        labels.append(own_labels.cpu())
    model.train()
    features, numbers = (torch.cat(run.group.gather(torch.cat(rows), Tensor)) for rows in (parts, labels))
    return ImageTensors(features.view(-1, 1, 1, width), numbers)
