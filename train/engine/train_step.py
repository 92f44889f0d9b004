"""One optimizer step of a model across ranks."""

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
    """A model with its optimizer, and how far it is; `forward` is the model, wrapped for its peers and compiled.

    `losses` are those of the epoch under way, a number a step; `best` is the best accuracy that was saved; `phase`
    marks the phases of a step for a profile.
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
    phase: Phase = no_phase
    shared: nn.Module = field(init=False)
    forward: Callable[[Tensor], Tensor] = field(init=False)
    scaler: GradScaler = field(init=False)
    average: AveragedModel | None = None
    compiler: Callable[[nn.Module], Callable[[Tensor], Tensor]] | None = None
    pruned: bool = False

    def __post_init__(self) -> None:
        """Let gradients be averaged over the ranks."""
        self.scaler = gradient_scaler(self.precision, self.group.device)
        self.take(self.model, self.optimizer, self.average)

    def take(self, model: nn.Module, optimizer: torch.optim.Optimizer, average: AveragedModel | None = None) -> None:
        """Go on with this model, its optimizer, and the average of its weights where that is wanted."""
        self.model, self.optimizer, self.average = model, optimizer, average
        self.shared = wrap_ddp(model, self.settings, self.group)
        self.forward = self.compiler(self.shared) if self.compiler else self.shared

    @property
    def eval_model(self) -> nn.Module:
        """The model that is evaluated and exported: the average where there is one."""
        return self.average.module if self.average else self.model

    def sharded_state(self) -> ShardedState:
        """Return what a sharded checkpoint holds."""
        from train.checkpoint.sharded import ShardedState

        return ShardedState(model=self.model, optimizer=self.optimizer, average=self.average, ranks=self.group)

    def learn(self, batch: Batch) -> Tensor:
        """Take one optimizer step; return this rank's part of the batch's mean loss, not yet synchronised.

        Losses are sums over a rank's images divided by the global batch's size, so that the gradient is that of
        the whole batch's mean, whatever the ranks' shares and the number of parts. DDP's mean over the
        ranks is made up for. What the model itself draws (dropout) depends on seed, step and rank alone, so that a
        run which goes on from a checkpoint draws the same.
        """
        seed_everything(derive_seed(self.settings.seed, "step", self.step, self.group.rank), self.group.device)
        set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        divided = gradient_divisor(self.model, self.group)
        for index, (images, labels) in enumerate(batch.parts):
            last = index == len(batch.parts) - 1
            with no_sync_until_last(self.shared, last):
                with self.phase(FORWARD):
                    with autocast(self.precision, self.group.device):
                        logits = self.forward(images)
                    part = self.loss(logits, labels) / batch.size
                    if batch.others:
                        part = part.lerp(self.loss(logits, batch.others[index]) / batch.size, 1 - batch.own)
                with self.phase(BACKWARD):
                    whole = part if divided == 1 else part * divided
                    self.scaler.scale(whole).backward()  # type: ignore[no-untyped-call]
            losses.append(part.detach())
        with self.phase(OPTIMIZER):
            if self.settings.max_grad_norm:
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if self.average:
                self.average.update_parameters(self.model)
        self.step += 1
        return sum(losses[1:], losses[0])

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of the losses of (N, classes) logits, in fp32."""
        smoothing = self.settings.label_smoothing
        return cross_entropy(
            logits.float(), labels, reduction="sum", ignore_index=IGNORE_LABEL, label_smoothing=smoothing
        )
