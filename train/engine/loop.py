"""The training loop: one optimizer step from a batch, and an epoch of them with its log."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel

from entrypoint.core.errors import Exit, Refused, first_line
from train.acceleration.amp import computing, gradient_scaler
from train.data.batches import LEFT_OUT, Batch, Feed
from train.distributed.ddp import divided_by, kept_apart, share_gradients
from train.distributed.process_group import Group
from train.engine.optimizer import set_lr
from train.preemption import GO_ON, SAVE, STOP
from train.report.profiler import BACKWARD, DATA, FORWARD, OPTIMIZER, Phase, unmarked
from train.seeding import seed_draws, seed_of
from train.settings import TrainSettings


@dataclass
class Learner:
    """A model with its optimizer, and how far it is; `forward` is the model, wrapped for its peers and compiled.

    `losses` are those of the epoch under way, a number a step; `best` is the best accuracy that was saved; `phase`
    marks the phases of a step for a profile.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    lr: Callable[[int], float]
    settings: TrainSettings
    group: Group
    precision: str = "fp32"
    step: int = 0
    seconds: float = 0.0
    best: float = -1.0
    losses: list[float] = field(default_factory=list)
    first_step_seconds: float = 0.0
    phase: Phase = unmarked
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
        self.shared = share_gradients(model, self.settings, self.group)
        self.forward = self.compiler(self.shared) if self.compiler else self.shared

    @property
    def judged(self) -> nn.Module:
        """The model that is evaluated and exported: the average where there is one."""
        return self.average.module if self.average else self.model

    def learn(self, batch: Batch) -> Tensor:
        """Take one optimizer step; return this rank's part of the batch's mean loss, not yet synchronised.

        Losses are sums over a rank's images divided by the global batch's size, so that the gradient is that of
        the whole batch's mean, whatever the ranks' shares and the number of parts. DDP's mean over the
        ranks is made up for. What the model itself draws (dropout) depends on seed, step and rank alone, so that a
        run which goes on from a checkpoint draws the same.
        """
        seed_draws(seed_of(self.settings.seed, "step", self.step, self.group.rank), self.group.device)
        set_lr(self.optimizer, self.lr(self.step))
        self.optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        divided = divided_by(self.model, self.group)
        for index, (images, labels) in enumerate(batch.parts):
            last = index == len(batch.parts) - 1
            with kept_apart(self.shared, last):
                with self.phase(FORWARD):
                    with computing(self.precision, self.group.device):
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
        return cross_entropy(logits.float(), labels, reduction="sum", ignore_index=LEFT_OUT, label_smoothing=smoothing)


def not_compiled(settings: TrainSettings, error: RuntimeError) -> Refused | None:
    """Return the refusal of a step that could not be compiled, None for another error.

    Compilers raise errors of torch's inner modules, or tell by NotImplementedError what they lack.
    """
    if settings.compile == "off":
        return None
    if not type(error).__module__.startswith("torch._") and not isinstance(error, NotImplementedError):
        return None
    cause = first_line(getattr(error, "inner_exception", error))  # the outer one's first line only names the backend
    backend = settings.compile_backend
    return Refused(
        f"TRAIN_COMPILE_BACKEND={backend}: the step cannot be compiled ({cause}); set TRAIN_COMPILE=off", Exit.MACHINE
    )


Report = Callable[[int, float, float], None]


def train_epoch(
    learner: Learner,
    feed: Feed,
    epoch: int,
    log_interval: int,
    report: Report,
    wish: Callable[[], int] = lambda: GO_ON,
    after_step: Callable[[], None] = lambda: None,
    save: Callable[[], None] = lambda: None,
    last_step: int | None = None,
) -> bool:
    """Train what is left of an epoch; return whether it was finished, unless any rank's `wish` was to stop.

    Losses stay on the device until a log interval ends; then one collective sums them over the ranks, so that
    the loop never waits for a number in between. `report` gets the step, the interval's mean loss, and images/s;
    `save` is called where a rank wishes to. The run ends with `last_step`, where that is given. Raises `Refused` at the
    first loss that is not finite.
    """
    pending: list[Tensor] = []
    began = epoch * feed.steps_per_epoch
    first, due = learner.step - began, feed.steps_per_epoch
    if last_step is not None:
        due = min(due, last_step - began)
    before = time.perf_counter()
    batches = islice(feed.train_batches(epoch, first), max(0, due - first))
    while True:
        with learner.phase(DATA):
            batch = next(batches, None)
        if batch is None:
            return True
        agreed = learner.group.vote(wish())
        pending.append(learn(learner, batch))
        wanted = agreed()
        after_step()
        done = len(learner.losses) + len(pending)
        if len(pending) < log_interval and done < due and wanted == GO_ON:
            continue
        losses = learner.group.sum(torch.stack(pending)).tolist()
        check_finite(losses, learner.step - len(losses))
        now = time.perf_counter()
        report(learner.step, sum(losses) / len(losses), batch.size * len(losses) / (now - before))
        learner.seconds += now - before
        learner.losses += losses
        pending, before = [], now
        if wanted == SAVE:
            save()
        if wanted == STOP:
            return False


def learn(learner: Learner, batch: Batch) -> Tensor:
    """Take a step; the process's first one is waited for and timed by itself, since it compiles and warms up."""
    if learner.first_step_seconds:
        return learner.learn(batch)
    began = time.perf_counter()
    try:
        loss = learner.learn(batch)
    except RuntimeError as error:
        raise not_compiled(learner.settings, error) or error from None
    loss.item()
    learner.first_step_seconds = time.perf_counter() - began
    return loss


def check_finite(losses: list[float], first_step: int) -> None:
    """Refuse the first loss that is NaN or infinite, by the number of its step, counted from 1."""
    for step, loss in enumerate(losses, first_step + 1):
        if not math.isfinite(loss):
            raise Refused(
                f"step {step}: the loss is {loss}; lower TRAIN_LR, or set TRAIN_MAX_GRAD_NORM=1", Exit.RANK_FAILED
            )
