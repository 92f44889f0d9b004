"""Build a run's model, optimizer and EMA model from settings and plan: new, pruned or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

from entrypoint.plan.model import Plan
from train.acceleration.amp import configure_tf32, set_memory_format, use_fp8
from train.acceleration.ipex import optimize_with_ipex
from train.acceleration.small_conv import use_matmul_for_small_inputs
from train.acceleration.torch_workarounds import match_optimizer_state_format, orthogonalize_in_fp32
from train.acceleration.winograd import use_winograd
from train.checkpoint.metadata import EMA, MODEL, NO_BEST, OPTIMIZER, corrupt_error
from train.checkpoint.optimizer_state import check_optimizer_state, load_optimizer_tensors
from train.checkpoint.resume import ResumePoint, check_shapes
from train.checkpoint.tensor_files import Tensors
from train.distributed.process_group import ProcessGroup
from train.distributed.sync_batchnorm import convert_sync_batchnorm
from train.engine.train_step import Trainer, TrainState
from train.models.cnn import SpeedNet
from train.models.freezing import freeze
from train.models.inspection import count_parameters, dry_run, head_names
from train.models.pruning import prune_state, resize_to_state, same_shapes
from train.models.registry import build_model, restore_state_metadata
from train.models.weights import FittedWeights, load_weights
from train.optimization.losses import Loss
from train.optimization.optimizer import build_optimizer, lr_schedule, make_ema, parameter_names
from train.planning.image_sizes import ImageSizes, image_sizes
from train.setting_groups.optimization import SGD
from train.settings import ImageShape, TrainSettings

BuiltModel = tuple[nn.Module, torch.optim.Optimizer, AveragedModel | None]


@dataclass(frozen=True)
class ModelBuilder:
    """Inputs from which the model of a run is built, once or again.

    `shape` is the shape of the model's images. `sample` returns some of them, the same on every rank, for models
    that initialize from data. `loss` is what the run minimizes.
    """

    settings: TrainSettings
    plan: Plan
    shape: ImageShape
    classes: tuple[str, ...]
    group: ProcessGroup
    sample: Callable[[], Tensor] | None = None
    loss: Loss = field(default_factory=Loss)

    @property
    def sizes(self) -> ImageSizes:
        """The shapes of images in training and evaluation."""
        return image_sizes(self.settings.data, self.plan.the_trainer().image_shape)

    def create_model(self) -> nn.Module:
        """Return a new unpruned model on the CPU, with random weights."""
        model = build_model(self.settings.network, self.shape, len(self.classes))
        if isinstance(model, SpeedNet) and self.sample:
            model.init_whitening(self.sample())
        return model

    def build(
        self,
        slim: Mapping[str, Tensor] | None = None,
        start: ResumePoint | None = None,
        weights: FittedWeights | None = None,
    ) -> BuiltModel:
        """Return model, optimizer and EMA model on the device; a pruned model takes its shapes from a state.

        A new run may start from `weights`, and a resumed one loads `start` where IPEX needs it before the rest.
        """
        settings, group = self.settings, self.group
        model = self.create_model()
        if slim is not None:
            resize_to_state(model, slim)
        if weights:
            weights.load_into(model)
        head = head_names(model, len(self.classes))
        if group.world_size > 1 and settings.compute.sync_batchnorm:
            model = convert_sync_batchnorm(model, group, compiled=settings.compute.compile != "off")
        freeze(model, settings.network.freeze, head)
        if self.plan.the_trainer().precision == "fp8":
            model = use_fp8(model, head)
        if group.world_size > 1 and settings.compute.parallelism == "fsdp":
            return self.shard(model, head)
        return self.accelerate(model, head, start)

    def shard(self, model: nn.Module, head: tuple[str, ...]) -> BuiltModel:
        """Return model, optimizer and EMA model, each rank's shard of them.

        With FSDP2, filters stay contiguous, because FSDP2 requires it. SGD is not fused there, because torch 2.8 does
        not support it.
        """
        from train.distributed.fsdp import apply_fsdp

        average = make_ema(model, self.settings.network)
        apply_fsdp(model, self.group)
        if average:
            apply_fsdp(average.module, self.group)
        fused = self.plan.the_trainer().precision != "fp16" and self.settings.optim.optimizer.lower() != SGD
        return model, build_optimizer(self.settings, model, head, fused=fused), average

    def accelerate(self, model: nn.Module, head: tuple[str, ...], start: ResumePoint | None) -> BuiltModel:
        """Return model, optimizer and EMA model on the device, with the convolutions that are fastest there.

        IPEX packs the weights and the optimizer's state, so a checkpoint `start` is loaded before it.
        """
        settings, trainer, on_cpu = self.settings, self.plan.the_trainer(), self.group.device.type == "cpu"
        model = set_memory_format(model.to(self.group.device), channels_last=settings.compute.channels_last)
        # Compilers and IPEX choose their own convolutions.
        eager = settings.compute.compile in ("off", "auto") and not trainer.use_ipex
        if eager and on_cpu and settings.compute.channels_last:
            model = use_matmul_for_small_inputs(model, self.shape)
        if trainer.winograd:
            model = use_winograd(model)
        fused = trainer.precision != "fp16" and not trainer.ipex_packs
        optimizer = build_optimizer(settings, model, head, fused=fused)
        if on_cpu and trainer.precision == "fp32":
            orthogonalize_in_fp32(optimizer)
        if trainer.use_ipex:
            if start:
                load_model_and_optimizer(model, optimizer, start)
            compiling = settings.compute.compile != "off"
            model, optimizer = optimize_with_ipex(model, optimizer, packs=trainer.ipex_packs, compiling=compiling)
        return model, optimizer, make_ema(model, settings.network)

    def load_weights(self) -> FittedWeights | None:
        """Return the weights that a new run starts from, read by rank 0 alone; raises `UserError`."""
        if not self.settings.network.weights:
            return None
        with torch.random.fork_rng(devices=[]):
            return self.group.run_on_main(
                lambda: load_weights(self.settings.network, self.create_model(), self.shape, self.classes),
                FittedWeights,
            )

    def create_trainer(self, total_steps: int, start: ResumePoint | None) -> Trainer:
        """Return the trainer of a new run or of a resumed one."""
        precision = self.plan.the_trainer().precision
        configure_tf32(precision, self.group.device)
        slim = None
        if start and self.settings.network.prune_ratio and self.settings.compute.parallelism == "ddp":
            slim = self.pruned_state(start)
        model, optimizer, average = self.build(slim, start, None if start else self.load_weights())
        schedule = lr_schedule(self.settings.optim, total_steps)
        # Small gradients would be zero in fp16.
        scaler = GradScaler(self.group.device.type, enabled=precision == "fp16")
        state = TrainState(model, optimizer, scaler, ema_model=average, pruned=slim is not None)
        trainer = Trainer(state, schedule, self.settings, self.group, precision, self.loss)
        sizes = self.sizes
        if sizes.schedule or sizes.train != sizes.decoded:
            trainer.image_shape = lambda step: sizes.train_shape(step, total_steps)
        if start:
            restore(trainer, start, loaded=self.plan.the_trainer().use_ipex)
        return trainer

    def pruned_state(self, start: ResumePoint) -> Tensors | None:
        """Return the state of a pruned model in a checkpoint, None if it is whole; raises `UserError`."""
        saved, whole = start.checkpoint.section(MODEL), self.create_model()
        if same_shapes(whole, saved):
            return None
        try:
            resize_to_state(whole, saved)
            dry_run(whole, self.shape)
        except (RuntimeError, ValueError) as error:
            raise corrupt_error(start.path, error) from None
        return saved

    def prune(self, trainer: Trainer) -> str:
        """Prune the trainer's model on all ranks, with a new optimizer; return the log line."""
        state = {name: value.detach().cpu() for name, value in trainer.state.model.state_dict().items()}
        before = count_parameters(trainer.state.model)
        with torch.random.fork_rng(devices=[]):  # initial weights are overwritten, and only rank 0 builds twice
            slim = self.group.run_on_main(
                lambda: prune_state(self.create_model(), state, self.shape, self.settings.network), dict[str, Tensor]
            )
            trainer.set_model(*self.build(slim))
        trainer.state.pruned = True
        # Scores of the whole model are no measure for those to come.
        trainer.state.best, trainer.state.best_metric, trainer.state.stale_epochs = NO_BEST, None, 0
        return f"pruned: {before:,} parameters before, {count_parameters(trainer.state.model):,} left"


def load_model_and_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, start: ResumePoint) -> None:
    """Load a checkpoint's model and optimizer; raises `UserError` if they are of another model."""
    load_module(model, MODEL, start)
    try:
        load_optimizer_tensors(optimizer, parameter_names(optimizer, model), start.checkpoint.section(OPTIMIZER))
        check_optimizer_state(optimizer)
    except ValueError as error:
        raise corrupt_error(start.path, error) from None
    match_optimizer_state_format(optimizer)


def load_module(model: nn.Module, section: str, start: ResumePoint) -> None:
    """Load a section of a checkpoint into a model; raises `UserError` if it is of another one."""
    saved = start.checkpoint.section(section)
    shapes = ({name: tuple(value.shape) for name, value in state.items()} for state in (saved, model.state_dict()))
    check_shapes(start.path, section, *shapes)
    model.load_state_dict(restore_state_metadata(model, saved))


def restore(trainer: Trainer, start: ResumePoint, *, loaded: bool) -> None:
    """Load a checkpoint's state into the trainer, whose model and optimizer may be `loaded` already.

    Without an EMA model in the checkpoint, it starts from the checkpoint's weights.
    """
    saved, state = start.metadata, trainer.state
    if trainer.settings.compute.parallelism == "fsdp":
        from train.engine import sharded_checkpoint  # the import is slow

        sharded_checkpoint.load(start.path, state, trainer.group)
    elif not loaded:
        load_model_and_optimizer(state.model, state.optimizer, start)
    if state.ema_model and not saved.tensors.get(EMA):
        state.ema_model.module.load_state_dict(state.model.state_dict())
    elif state.ema_model and trainer.settings.compute.parallelism == "ddp":
        load_module(state.ema_model, EMA, start)
    if saved.scaler and state.scaler.is_enabled():
        known = {"scale": saved.scaler.scale, "_growth_tracker": saved.scaler.growth_tracker}
        state.scaler.load_state_dict({**state.scaler.state_dict(), **known})
    state.step, state.seconds, state.losses = start.step, saved.seconds, list(start.losses)
    state.best, state.stale_epochs, state.best_metric = saved.best, saved.stale_epochs, saved.best_metric
    state.skipped_steps = saved.skipped_steps
