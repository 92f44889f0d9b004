"""What a checkpoint holds of a run: model, optimizer, scaler, EMA model and progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.swa_utils import AveragedModel

if TYPE_CHECKING:
    from train.checkpoint.sharded import ShardedState
    from train.distributed.process_group import ProcessGroup


@dataclass
class TrainState:
    """State that a checkpoint saves and a resumed run restores.

    `losses` holds one loss per step of the current epoch. `best` is the best saved accuracy.
    `best_metric` is the best value of what early stopping looks at, `stale_epochs` ago. `pruned` says that the model
    has the smaller shapes.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    ema_model: AveragedModel | None = None
    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    losses: list[float] = field(default_factory=list)
    stale_epochs: int = 0
    best_metric: float | None = None
    pruned: bool = False

    @property
    def eval_model(self) -> nn.Module:
        """Model that is evaluated and exported: the EMA model if there is one."""
        return self.ema_model.module if self.ema_model else self.model

    def sharded(self, group: ProcessGroup) -> ShardedState:
        """Return the part that a sharded checkpoint saves from all ranks."""
        from train.checkpoint.sharded import ShardedState

        return ShardedState(model=self.model, optimizer=self.optimizer, average=self.ema_model, ranks=group)
