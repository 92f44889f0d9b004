"""Compute the features of a frozen backbone once, where nothing changes the images: then epochs train one layer."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass

import torch
from msgspec.structs import replace
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
    width = feature_width(run, layer) if layer else 0
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
    settings, device = replace(run.settings, transforms="none"), run.group.device
    unchanged = Normalize(torch.zeros(1, width, 1, 1, device=device), torch.ones(1, width, 1, 1, device=device))
    part = TrainedPart(MemorySource(trained, others, settings, run.group, unchanged, run.source.rows), layer)
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
    if not settings.freeze or changes_images or needs_images or len(layers) > 1 or run.epochs - run.first_epoch < 2:
        return ""
    return layers.pop()


def feature_width(run: TrainingRun, layer: str) -> int:
    """Return how many numbers the layer gets of an image, 0 where they change, where more follows, or for too many."""
    model, images = copy.deepcopy(run.trainer.state.model), run.source.sample()[:CHECKED_IMAGES].to(run.group.device)
    with torch.random.fork_rng(devices=[]), autocast(run.trainer.precision, run.group.device), torch.no_grad():
        first, second = model.train()(images), model(images)
        inputs = inputs_of(model.eval(), layer, images)
        if len(inputs) != 1 or inputs[0].dim() != 2 or not torch.equal(first, second):
            return 0
        is_last = torch.allclose(first, model.get_submodule(layer)(inputs[0]), rtol=0.01, atol=0.01)
    width = inputs[0].shape[1]
    needed = 4 * width * (run.data.train_examples + run.data.test_examples)
    return width if is_last and needed <= MAX_BYTES else 0


def inputs_of(model: nn.Module, layer: str, images: Tensor) -> list[Tensor]:
    """Return what a layer gets in a forward pass, each time that it is called."""
    inputs: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    model(images)
    hook.remove()
    return inputs


def compute_features(run: TrainingRun, layer: str, split: int, width: int) -> ImageTensors:
    """Return the inputs of a layer, (N, 1, 1, width) floats, for all images of a split; none if a signal stops it."""
    model, parts, labels = run.trainer.state.model.eval(), [torch.empty(0, width)], [torch.empty(0, dtype=torch.int64)]
    for images, own_labels in run.source.eval_batches(split, None):
        if STOP_CONTROLLER.stop_requested:
            break
        with autocast(run.trainer.precision, run.group.device), torch.no_grad():
            (features,) = inputs_of(model, layer, images)
        parts.append(features.to("cpu", torch.float32, copy=True))
        labels.append(own_labels.cpu())
    model.train()
    share, sizes = torch.cat(parts), run.group.gather(sum(map(len, labels)), int)
    start, device = sum(sizes[: run.group.rank]), run.group.device
    features, all_labels = torch.zeros(sum(sizes), width), torch.zeros(sum(sizes), dtype=torch.int64)
    features[start : start + len(share)] = share
    all_labels[start : start + len(share)] = torch.cat(labels)
    summed = run.group.sum(features.to(device)).cpu()  # the others' rows are zeros here
    return ImageTensors(summed.view(-1, 1, 1, width), run.group.sum(all_labels.to(device)).cpu())
