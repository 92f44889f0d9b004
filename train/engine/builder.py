"""The model of a run with all that it is trained by, built from settings and plan: new, slim, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from entrypoint.plan.model import Plan
from train.acceleration.amp import configure
from train.acceleration.ipex import with_extension
from train.acceleration.memory_format import lay_out, lay_out_moments
from train.acceleration.small_conv import multiply_small
from train.checkpoint.single_file import Start
from train.data.batches import Feed
from train.data.datasets import DataSet, Images
from train.data.loader import Loader, Pictures
from train.data.memory_feed import MemoryFeed
from train.data.stream_feed import StreamFeed
from train.data.workers import Crew
from train.distributed.process_group import Group
from train.distributed.sync_batchnorm import has_batchnorm, synchronised
from train.engine.optimizer import averaged, build_optimizer, lr_schedule
from train.engine.train_step import Learner
from train.models.inspection import count_parameters
from train.models.pruning import cut_to, fits, slimmed
from train.models.registry import build_model, with_versions
from train.models.speednet import SpeedNet
from train.settings import ImageShape, TrainSettings

Built = tuple[nn.Module, torch.optim.Optimizer, AveragedModel | None]


@dataclass(frozen=True)
class Blueprint:
    """What a model is built from, as often as that is needed.

    `shape` is that of the images it sees; `sample` returns some of them, the same on every rank, for models that look.
    """

    settings: TrainSettings
    plan: Plan
    shape: ImageShape
    classes: int
    group: Group
    sample: Callable[[], Tensor] | None = None

    def bare(self) -> nn.Module:
        """Return the model as its definition has it, on the CPU."""
        model = build_model(self.settings.model, self.shape, self.classes, bias=self.settings.bias)
        if isinstance(model, SpeedNet) and self.sample:
            model.look(self.sample())
        return model

    def build(self, slim: Mapping[str, Tensor] | None = None) -> Built:
        """Return the model as the settings want it on the device, cut to a pruned one's state, with what goes with it.

        Spread over the ranks its filters stay contiguous, since FSDP2 takes no others, and so does its optimizer
        without fused SGD, which torch 2.8 cannot do there.
        """
        settings, group = self.settings, self.group
        model = self.bare()
        if slim is not None:
            cut_to(model, slim)
        if group.world_size > 1 and settings.sync_batchnorm and has_batchnorm(model):
            model = synchronised(model, group, compiled=settings.compile != "off")
        fused = self.plan.training["precision"] != "fp16"
        if group.world_size > 1 and settings.parallelism == "fsdp":
            from train.distributed.fsdp import spread

            average = averaged(model, settings)
            for one in filter(None, (model, average.module if average else None)):
                spread(one, group)
            return model, build_optimizer(settings, model, fused=fused and settings.optimizer != "sgd"), average
        eager = settings.compile in ("off", "auto") and not self.plan.training["ipex"]  # these pack for themselves
        plain = eager and group.device.type == "cpu"
        shared = group.world_size > 1
        model = lay_out(
            model.to(group.device), channels_last=settings.channels_last, plain_filters=plain, shared=shared
        )
        if plain and settings.channels_last:
            model = multiply_small(model, self.shape, by_taps=settings.gradient_compression != "powersgd")
        optimizer = build_optimizer(settings, model, fused=fused)
        if self.plan.training["ipex"]:
            model, optimizer = with_extension(model, optimizer, compiling=settings.compile != "off")
        return model, optimizer, averaged(model, settings)

    def learner(self, total_steps: int, start: Start | None) -> Learner:
        """Return the learner of a new run, or of one that goes on from what was saved."""
        precision = self.plan.training["precision"]
        configure(precision, self.group.device)
        slim = None
        if start and self.settings.prune_ratio and not fits(self.bare(), start.saved.model):
            slim = start.saved.model
        model, optimizer, average = self.build(slim)
        schedule = lr_schedule(self.settings, total_steps)
        learner = Learner(model, optimizer, schedule, self.settings, self.group, precision, average=average)
        learner.pruned = slim is not None
        if start:
            resume(learner, start)
        return learner

    def prune(self, learner: Learner) -> str:
        """Cut the learner's model down on all ranks alike, with a new optimizer for it; return what to tell."""
        state = {name: value.detach().cpu() for name, value in learner.model.state_dict().items()}
        before = count_parameters(learner.model)
        with torch.random.fork_rng(devices=[]):  # what a new model draws is overwritten, and only rank 0 draws twice
            slim = self.group.from_leader(lambda: slimmed(self.bare(), state, self.shape, self.settings))
            learner.take(*self.build(slim))
        learner.pruned = True
        return (
            f"pruned by {self.settings.prune_backend}: {before:,} parameters before,"
            f" {count_parameters(learner.model):,} left"
        )


def resume(learner: Learner, start: Start) -> None:
    """Put a checkpoint's state into the learner."""
    saved = start.saved
    if learner.settings.parallelism == "fsdp":
        from train.checkpoint import sharded

        sharded.load(start.path, learner.sharded_state(), with_versions)
    else:
        learner.model.load_state_dict(with_versions(learner.model, saved.model))
        learner.optimizer.load_state_dict(dict(saved.optimizer))
        lay_out_moments(learner.optimizer)
        if learner.average:
            learner.average.load_state_dict(with_versions(learner.average, saved.average))
    learner.scaler.load_state_dict(dict(saved.scaler))
    learner.step, learner.seconds, learner.losses = saved.step, saved.seconds, list(saved.losses)
    learner.best = saved.best


def build_loader(data: DataSet, settings: TrainSettings, group: Group, plan: Plan) -> Loader | None:
    """Return what decodes a streamed set for this rank, None for one that is in memory."""
    if isinstance(data.train, Images) or isinstance(data.test, Images):
        return None
    sharing = plan.ranks if plan.bind == "none" else (plan.ranks[group.local_rank],)
    crew = Crew(frozenset(cpu for rank in sharing for cpu in rank.cpus), plan.training["workers"])
    return Loader(Pictures((data.train, data.test), data.shape), crew, settings, group.device)


def build_feed(data: DataSet, loader: Loader | None, settings: TrainSettings, group: Group) -> Feed:
    """Return the feed for how the data came."""
    if loader:
        return StreamFeed(loader, settings, group)
    assert isinstance(data.train, Images)
    assert isinstance(data.test, Images)
    return MemoryFeed(data.train, data.test, data.shape, settings, group)
