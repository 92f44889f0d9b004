"""The model of a run with all that it is trained by, built from settings and plan: new, slim, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from entrypoint.plan.model import Plan
from train.acceleration.amp import configure_tf32
from train.acceleration.ipex import optimize_with_ipex
from train.acceleration.memory_format import match_optimizer_state_format, set_memory_format
from train.acceleration.small_conv import use_matmul_for_small_inputs
from train.checkpoint.single_file import ResumePoint
from train.data.batches import BatchSource
from train.data.datasets import DataSet, ImageTensors
from train.data.loader import BatchLoader, ImageDataset
from train.data.memory_feed import MemorySource
from train.data.stream_feed import StreamSource
from train.data.workers import WorkerPoolSpec
from train.distributed.process_group import ProcessGroup
from train.distributed.sync_batchnorm import convert_sync_batchnorm, has_batchnorm
from train.engine.optimizer import build_optimizer, lr_schedule, make_ema
from train.engine.train_step import Trainer
from train.models.inspection import count_parameters
from train.models.pruning import prune_state, resize_to_state, same_shapes
from train.models.registry import build_model, restore_state_metadata
from train.models.speednet import SpeedNet
from train.settings import ImageShape, TrainSettings

BuiltModel = tuple[nn.Module, torch.optim.Optimizer, AveragedModel | None]


@dataclass(frozen=True)
class ModelBuilder:
    """What a model is built from, as often as that is needed.

    `shape` is that of the images it sees; `sample` returns some of them, the same on every rank, for models that look.
    """

    settings: TrainSettings
    plan: Plan
    shape: ImageShape
    classes: int
    group: ProcessGroup
    sample: Callable[[], Tensor] | None = None

    def create_model(self) -> nn.Module:
        """Return the model as its definition has it, on the CPU."""
        model = build_model(self.settings.model, self.shape, self.classes, bias=self.settings.bias)
        if isinstance(model, SpeedNet) and self.sample:
            model.look(self.sample())
        return model

    def build(self, slim: Mapping[str, Tensor] | None = None) -> BuiltModel:
        """Return the model as the settings want it on the device, cut to a pruned one's state, with what goes with it.

        Spread over the ranks its filters stay contiguous, since FSDP2 takes no others, and so does its optimizer
        without fused SGD, which torch 2.8 cannot do there.
        """
        settings, group = self.settings, self.group
        model = self.create_model()
        if slim is not None:
            resize_to_state(model, slim)
        if group.world_size > 1 and settings.sync_batchnorm and has_batchnorm(model):
            model = convert_sync_batchnorm(model, group, compiled=settings.compile != "off")
        fused = self.plan.the_trainer().precision != "fp16"
        if group.world_size > 1 and settings.parallelism == "fsdp":
            from train.distributed.fsdp import apply_fsdp

            average = make_ema(model, settings)
            for one in filter(None, (model, average.module if average else None)):
                apply_fsdp(one, group)
            return model, build_optimizer(settings, model, fused=fused and settings.optimizer != "sgd"), average
        eager = (
            settings.compile in ("off", "auto") and not self.plan.the_trainer().use_ipex
        )  # these pack for themselves
        plain = eager and group.device.type == "cpu"
        shared = group.world_size > 1
        model = set_memory_format(
            model.to(group.device), channels_last=settings.channels_last, plain_filters=plain, shared=shared
        )
        if plain and settings.channels_last:
            model = use_matmul_for_small_inputs(model, self.shape, by_taps=settings.gradient_compression != "powersgd")
        optimizer = build_optimizer(settings, model, fused=fused)
        if self.plan.the_trainer().use_ipex:
            model, optimizer = optimize_with_ipex(model, optimizer, compiling=settings.compile != "off")
        return model, optimizer, make_ema(model, settings)

    def create_trainer(self, total_steps: int, start: ResumePoint | None) -> Trainer:
        """Return the trainer of a new run, or of one that goes on from what was saved."""
        precision = self.plan.the_trainer().precision
        configure_tf32(precision, self.group.device)
        slim = None
        if start and self.settings.prune_ratio and not same_shapes(self.create_model(), start.saved.model):
            slim = start.saved.model
        model, optimizer, average = self.build(slim)
        schedule = lr_schedule(self.settings, total_steps)
        trainer = Trainer(model, optimizer, schedule, self.settings, self.group, precision, ema_model=average)
        trainer.pruned = slim is not None
        if start:
            restore(trainer, start)
        return trainer

    def prune(self, trainer: Trainer) -> str:
        """Cut the trainer's model down on all ranks alike, with a new optimizer for it; return what to tell."""
        state = {name: value.detach().cpu() for name, value in trainer.model.state_dict().items()}
        before = count_parameters(trainer.model)
        with torch.random.fork_rng(devices=[]):  # what a new model draws is overwritten, and only rank 0 draws twice
            slim = self.group.run_on_main(lambda: prune_state(self.create_model(), state, self.shape, self.settings))
            trainer.set_model(*self.build(slim))
        trainer.pruned = True
        return (
            f"pruned by {self.settings.prune_backend}: {before:,} parameters before,"
            f" {count_parameters(trainer.model):,} left"
        )


def restore(trainer: Trainer, start: ResumePoint) -> None:
    """Put a checkpoint's state into the trainer."""
    saved = start.saved
    if trainer.settings.parallelism == "fsdp":
        from train.checkpoint import sharded

        sharded.load(start.path, trainer.sharded_state(), restore_state_metadata)
    else:
        trainer.model.load_state_dict(restore_state_metadata(trainer.model, saved.model))
        trainer.optimizer.load_state_dict(dict(saved.optimizer))
        match_optimizer_state_format(trainer.optimizer)
        if trainer.ema_model:
            trainer.ema_model.load_state_dict(restore_state_metadata(trainer.ema_model, saved.average))
    trainer.scaler.load_state_dict(dict(saved.scaler))
    trainer.step, trainer.seconds, trainer.losses = saved.step, saved.seconds, list(saved.losses)
    trainer.best = saved.best


def build_loader(data: DataSet, settings: TrainSettings, group: ProcessGroup, plan: Plan) -> BatchLoader | None:
    """Return what decodes a streamed set for this rank, None for one that is in memory."""
    if isinstance(data.train, ImageTensors) or isinstance(data.test, ImageTensors):
        return None
    sharing = plan.ranks if plan.binding.cpu_binding == "none" else (plan.ranks[group.local_rank],)
    worker_pool = WorkerPoolSpec(
        frozenset(cpu for rank in sharing for cpu in rank.cpus), plan.the_trainer().num_workers
    )
    return BatchLoader(ImageDataset((data.train, data.test), data.shape), worker_pool, settings, group.device)


def build_source(
    data: DataSet, loader: BatchLoader | None, settings: TrainSettings, group: ProcessGroup
) -> BatchSource:
    """Return the feed for how the data came."""
    if loader:
        return StreamSource(loader, settings, group)
    assert isinstance(data.train, ImageTensors)
    assert isinstance(data.test, ImageTensors)
    return MemorySource(data.train, data.test, data.shape, settings, group)
