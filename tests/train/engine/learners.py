"""A linear model with its optimizer, and a batch for it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from tests.factories import train_settings
from train.data.feeds.batches import Batch
from train.distributed.process_group import ProcessGroup
from train.engine.train_step import Trainer, TrainState
from train.optimization.losses import Loss
from train.optimization.optimizer import build_optimizer, make_ema
from train.seeding import make_generator

ALONE = ProcessGroup(0, 1, 0, torch.device("cpu"))


X = torch.randn(12, 4, generator=make_generator("x"))


Y = torch.randint(0, 3, (12,), generator=make_generator("y"))


def trainer(*, fused: bool = True, **settings: object) -> Trainer:
    torch.manual_seed(0)
    chosen = train_settings({"lr": 0.1, **settings})
    model = nn.Linear(4, 3)
    optimizer, average = build_optimizer(chosen, model, fused=fused), make_ema(model, chosen.network)
    state = TrainState(model, optimizer, GradScaler("cpu", enabled=False), ema_model=average)
    loss = Loss(smoothing=chosen.optim.label_smoothing)
    return Trainer(state, lambda _: 0.1, chosen, ALONE, loss=loss)


def weights(one: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.state.model.parameters()])


class TwelveAtATime:
    """Seven steps of the batch."""

    steps_per_epoch = 7

    def train_batches(self, _epoch: int, first: int = 0) -> Iterator[Batch]:
        for _ in range(first, self.steps_per_epoch):
            yield Batch(((X, Y),), 12)

    def test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield X, Y
