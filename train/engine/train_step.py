"""Take one optimizer step of a model across ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from train.acceleration.amp import autocast, gradient_scaler
from train.data.batches import IGNORE_LABEL, Batch
from train.distributed.ddp import gradient_divisor, no_sync_until_last, wrap_ddp
from train.distributed.process_group import ProcessGroup
from train.engine.optimizer import set_lr
from train.report.profiler import BACKWARD, FORWARD, OPTIMIZER, Phase, no_phase
from train.seeding import derive_seed, seed_everything
from train.settings import TrainSettings

if TYPE_CHECKING:
    from train.checkpoint.sharded import ShardedState


@dataclass
class Trainer:
    """Model, optimizer and progress of training.

    `ddp_model` is the model wrapped by DDP if there are several ranks, and `compiled_forward` the compiled one.
    `losses` holds one loss per step of the current epoch. `best` is the best saved accuracy. `mark_phase` marks the
    phases of a step for the profiler.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Callable[[int], float]
    settings: TrainSettings
    group: ProcessGroup
    precision: str = "fp32"
    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    losses: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    mark_phase: Phase = no_phase
    ddp_model: nn.Module = field(init=False)
    compiled_forward: Callable[[Tensor], Tensor] = field(init=False)
    scaler: GradScaler = field(init=False)
    ema_model: AveragedModel | None = None
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    pruned: bool = False

    def __post_init__(self) -> None:
        """Create the gradient scaler and wrap the model."""
        self.scaler = gradient_scaler(self.precision, self.group.device)
        self.set_model(self.model, self.optimizer, self.ema_model)

    def set_model(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None = None
    ) -> None:
        """Replace the model, its optimizer and its EMA model."""
        self.model, self.optimizer, self.ema_model = model, optimizer, average
        self.ddp_model = wrap_ddp(model, self.settings, self.group)
        self.compiled_forward = self.compiler(self.ddp_model) if self.compiler else self.ddp_model

    @property
    def eval_model(self) -> nn.Module:
        """Model that is evaluated and exported: the EMA model if there is one."""
        return self.ema_model.module if self.ema_model else self.model

    def sharded_state(self) -> ShardedState:
        """Return the state for a sharded checkpoint."""
        from train.checkpoint.sharded import ShardedState

        return ShardedState(model=self.model, optimizer=self.optimizer, average=self.ema_model, ranks=self.group)

    def train_step(self, batch: Batch) -> Tensor:
        """Take one optimizer step; return this rank's share of the batch's mean loss, without synchronization.

        The loss is the sum over a rank's images divided by the global batch size. So the gradient is that of the global
        mean for any number of ranks and micro-batches. A factor compensates for DDP's mean over the ranks. Dropout
        depends on seed, step and rank alone, so a resumed run samples the same values.
        """
        seed_everything(derive_seed(self.settings.seed, "step", self.step, self.group.rank), self.group.device)
        set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        divided = gradient_divisor(self.model, self.group)
        for index, (images, labels) in enumerate(batch.micro_batches):
            last = index == len(batch.micro_batches) - 1
            with no_sync_until_last(self.ddp_model, last):
                with self.mark_phase(FORWARD):
                    with autocast(self.precision, self.group.device):
                        logits = self.compiled_forward(images)
                    part = self.loss(logits, labels) / batch.size
                    if batch.mixed_labels:
                        part = part.lerp(
                            self.loss(logits, batch.mixed_labels[index]) / batch.size, 1 - batch.mix_weight
                        )
                with self.mark_phase(BACKWARD):
                    whole = part if divided == 1 else part * divided
                    self.scaler.scale(whole).backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        with self.mark_phase(OPTIMIZER):
            if self.settings.max_grad_norm:
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.ema_model:
                self.ema_model.update_parameters(self.model)
        self.step += 1
        return sum(losses[1:], losses[0])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the fp32 losses of (N, classes) logits."""
        smoothing = self.settings.label_smoothing
        return cross_entropy(
            logits.float(), labels, reduction="sum", ignore_index=IGNORE_LABEL, label_smoothing=smoothing
        )
