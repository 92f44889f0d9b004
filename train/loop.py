"""The training loop: one optimizer step from a batch, and an epoch of them with its log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from entrypoint.errors import Exit, Refused
from train.batches import LEFT_OUT, Batch, Feed
from train.group import Group
from train.optim import set_lr
from train.precision import computing
from train.settings import TrainSettings


@dataclass
class Learner:
    """A model with its optimizer, and how far it is; `forward` is the model, wrapped where there are peers.

    `precision` is what it computes in, fp32 or bf16; `losses` are those of the epoch under way, a number a step.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Callable[[int], float]
    settings: TrainSettings
    group: Group
    precision: str = "fp32"
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    forward: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        """Let gradients be averaged over the ranks."""
        self.forward = self.model
        if self.group.world_size > 1:
            devices = [self.group.device] if self.group.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=devices, gradient_as_bucket_view=True)

    def learn(self, batch: Batch) -> Tensor:
        """Take one optimizer step; return this rank's part of the batch's mean loss, not yet synchronised.

        Losses are sums over a rank's images divided by the global batch's size, so that the gradient is that of
        the whole batch's mean, whatever the ranks' shares and the number of parts. DDP averages over the ranks,
        hence the factor.
        """
        set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        mean_loss = torch.zeros((), device=self.group.device)
        for index, (images, labels) in enumerate(batch.parts):
            last = index == len(batch.parts) - 1
            with nullcontext() if last or self.forward is self.model else self.forward.no_sync():  # type: ignore[operator]
                with computing(self.precision, self.group.device):
                    logits = self.forward(images)
                loss = cross_entropy(
                    logits.float(),
                    labels,
                    reduction="sum",
                    ignore_index=LEFT_OUT,
                    label_smoothing=self.settings.label_smoothing,
                )
                part = loss / batch.size
                (part * self.group.world_size).backward()  # type: ignore[no-untyped-call]
            mean_loss += part.detach()
        if self.settings.clip_norm:
            clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.step += 1
        return mean_loss


Report = Callable[[int, float, float], None]


def train_epoch(
    learner: Learner,
    feed: Feed,
    epoch: int,
    log_interval: int,
    report: Report,
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Train what is left of an epoch; return whether it was finished, which it is not where `stop` said so on any rank.

    Losses stay on the device until a log interval ends; then one collective sums them over the ranks, so that
    the loop never waits for a number in between. `report` gets the step, the interval's mean loss, and images/s.
    Raises `Refused` at the first loss that is not finite.
    """
    pending: list[Tensor] = []
    first = learner.step - epoch * feed.steps_per_epoch
    before = time.perf_counter()
    for batch in feed.train_batches(epoch, first):
        to_stop = learner.group.vote(stop())
        pending.append(learner.learn(batch))
        stopping = to_stop()
        done = len(learner.losses) + len(pending)
        if len(pending) < log_interval and done < feed.steps_per_epoch and not stopping:
            continue
        losses = learner.group.sum(torch.stack(pending)).tolist()
        check_finite(losses, learner.step - len(losses))
        now = time.perf_counter()
        report(learner.step, sum(losses) / len(losses), batch.size * len(losses) / (now - before))
        learner.seconds += now - before
        learner.losses += losses
        pending, before = [], now
        if stopping:
            return False
    return True


def check_finite(losses: list[float], first_step: int) -> None:
    """Refuse the first loss that is NaN or infinite, by the number of its step, counted from 1."""
    for step, loss in enumerate(losses, first_step + 1):
        if not math.isfinite(loss):
            raise Refused(
                f"step {step}: the loss is {loss}; lower TRAIN_LR, or set TRAIN_CLIP_NORM=1", Exit.RANK_FAILED
            )
