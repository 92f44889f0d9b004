"""Take one optimizer step of a model across ranks, on the state that a checkpoint holds.

With distillation it also learns the answers of a trained model, its teacher (arXiv:1503.02531).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import kl_div
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from train.acceleration.amp import autocast, set_memory_format
from train.checkpoint.metadata import NO_BEST
from train.data.feeds.batches import IGNORE_LABEL, Batch
from train.distributed.ddp import is_sharded, no_sync_until_last, wrap_ddp
from train.distributed.process_group import ProcessGroup
from train.evaluation.load_model import load_model
from train.optimization.losses import Loss
from train.optimization.optimizer import set_lr
from train.planning.image_sizes import model_input_shape
from train.planning.trained_run import read_trained_run
from train.report.cost import EnergyMeter, GpuClock
from train.report.profiler import BACKWARD, FORWARD, OPTIMIZER, Phase, no_phase
from train.report.stragglers import StepMeter
from train.seeding import derive_seed, seed_everything
from train.settings import ImageShape, TrainSettings
from train.transforms.normalize import Normalize, resize_batch

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
    if not settings.optim.teacher or settings.data.task != "classify":
        return None
    trained, device = (
        read_trained_run(settings.optim.teacher, "TRAIN_TEACHER", settings.network.model),
        normalize.mean.device,
    )
    with torch.random.fork_rng(devices=[]):
        model = load_model(trained, trained.settings).requires_grad_(requires_grad=False)
    theirs = Normalize.from_metadata(trained.normalization, device, normalize.layout)
    return Teacher(
        set_memory_format(model.to(device), channels_last=settings.compute.channels_last),
        torch.tensor(trained.order_of(classes, "TRAIN_TEACHER"), device=device),
        model_input_shape(trained.settings.data, trained.shape),
        theirs.scale / normalize.scale,
        (normalize.mean - theirs.mean) * theirs.scale,
    )


@dataclass
class TrainState:
    """State that a checkpoint saves and a resumed run restores.

    `losses` holds one loss per step of the current epoch. `best` is the best saved score.
    `best_metric` is the best value of what early stopping looks at, `stale_epochs` ago. `pruned` says that the model
    has the smaller shapes. `skipped_steps` changed nothing.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    ema_model: AveragedModel | None = None
    step: int = 0
    seconds: float = 0.0
    best: float = NO_BEST
    losses: list[float] = field(default_factory=list)
    stale_epochs: int = 0
    best_metric: float | None = None
    pruned: bool = False
    skipped_steps: int = 0

    @property
    def eval_model(self) -> nn.Module:
        """Model that is evaluated and exported: the EMA model if there is one."""
        return self.ema_model.module if self.ema_model else self.model


@dataclass
class Trainer:
    """Takes the steps of a run on its `state`.

    `loss` returns the sum of the losses of (N, outputs) logits and (N,) labels. `ddp_model` is the model wrapped by
    DDP if there are several ranks, and `compiled_forward` what `compiler` makes of it, each time it is replaced.
    `mark_phase` marks the phases of a step for the profiler, and `meter` says where the time goes. `image_shape` is
    what images are resized to, by step. `grad_norm` is the last step's where something needs it. `skipped` counts the
    last steps in a row that changed nothing.
    """

    state: TrainState
    lr: Callable[[int], float]
    settings: TrainSettings
    group: ProcessGroup
    precision: str = "fp32"
    loss: Callable[[Tensor, Tensor], Tensor] = field(default_factory=Loss)
    first_step_seconds: float = 0.0
    mark_phase: Phase = no_phase
    image_shape: Callable[[int], ImageShape] | None = None
    ddp_model: nn.Module = field(init=False)
    compiled_forward: Callable[[Tensor], Tensor] = field(init=False)
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    meter: StepMeter = field(default_factory=StepMeter)
    teacher: Teacher | None = None
    grad_norm: Tensor | None = None
    skipped: int = 0
    gpu_clock: GpuClock = field(init=False)
    energy: EnergyMeter = field(init=False)

    def __post_init__(self) -> None:
        """Wrap the model, and find the GPU's clock and the counters of energy."""
        self.gpu_clock = GpuClock(self.group.device)
        self.energy = EnergyMeter(self.gpu_clock, reads_node=self.group.local_rank == 0)
        self.energy.sample()
        self.set_model(self.state.model, self.state.optimizer, self.state.ema_model)

    def set_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None = None
    ) -> None:
        """Replace the model, its optimizer and its EMA model."""
        self.state.model, self.state.optimizer, self.state.ema_model = model, optimizer, average
        self.ddp_model = wrap_ddp(model, self.settings.compute, self.group)
        self.compiled_forward = self.compiler(self.ddp_model) if self.compiler else self.ddp_model

    def train_step(self, batch: Batch) -> Tensor:
        """Take one optimizer step; return this rank's share of the batch's mean loss, without synchronization.

        The loss is the sum over a rank's images divided by the global batch size. So the gradient is that of the global
        mean for any number of ranks and micro-batches. A factor compensates for DDP's mean over the ranks, where a
        sharded model sums. Dropout depends on seed, step and rank alone, so a resumed run samples the same values.
        """
        state = self.state
        statistics = [buffer.clone() for buffer in state.model.buffers()] if self.settings.optim.skip_nonfinite else []
        seed_everything(derive_seed(self.settings.optim.seed, "step", state.step, self.group.rank), self.group.device)
        set_lr(state.optimizer, self.lr(state.step))
        state.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        divided = 1 if is_sharded(state.model) else self.group.world_size
        for index, (images, labels) in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            if self.image_shape:
                images = resize_batch(images, self.image_shape(state.step))
            with no_sync_until_last(self.ddp_model, last=last):
                with self.mark_phase(FORWARD):
                    with autocast(self.precision, self.group.device):
                        logits = self.compiled_forward(images)
                    part = self.loss(logits, labels) / batch.size
                    if batch.mixed_labels:
                        part = part.lerp(
                            self.loss(logits, batch.mixed_labels[index]) / batch.size, 1 - batch.mix_weight
                        )
                    if self.teacher:
                        with autocast(self.precision, self.group.device):
                            theirs = self.teacher.loss(images, logits, labels) / batch.size
                        part = part.lerp(theirs, self.settings.optim.teacher_weight)
                with self.mark_phase(BACKWARD):
                    whole = part if divided == 1 else part * divided
                    state.scaler.scale(whole).backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        loss = sum(losses[1:], losses[0])
        with self.mark_phase(OPTIMIZER):
            if self.clip_gradients():
                state.scaler.step(state.optimizer)
                if state.ema_model:
                    state.ema_model.update_parameters(state.model)
            else:
                self.undo_statistics(statistics)
                # A scaled loss overflows now and then; the scaler then lowers its factor, and nothing is wrong.
                loss = loss if state.scaler.is_enabled() else torch.full_like(loss, math.nan)
            state.scaler.update()
        state.step += 1
        return loss

    def clip_gradients(self) -> bool:
        """Clip the gradients where that is asked for, note their norm, and return whether the step may be taken."""
        settings, state = self.settings, self.state
        if not settings.optim.max_grad_norm and not settings.optim.skip_nonfinite:
            return True
        state.scaler.unscale_(state.optimizer)
        norm = clip_grad_norm_(state.model.parameters(), settings.optim.max_grad_norm or math.inf)
        self.grad_norm = getattr(norm, "full_tensor", lambda: norm)()  # FSDP's is spread over the ranks
        return not settings.optim.skip_nonfinite or bool(self.grad_norm.isfinite())

    def undo_statistics(self, statistics: list[Tensor]) -> None:
        """Give the model's buffers their values back, as BatchNorm has counted a batch that is skipped."""
        with torch.no_grad():
            for buffer, before in zip(self.state.model.buffers(), statistics, strict=True):
                buffer.copy_(before)
