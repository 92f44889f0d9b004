"""Train one epoch: steps, loss log and stop requests."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from entrypoint.core.console import write_stderr
from entrypoint.core.errors import ExitCode, UserError
from train.data.feeds.batches import Batch, BatchSource
from train.engine.compile import compile_error
from train.engine.train_step import Trainer
from train.preemption import CONTINUE, SAVE, STOP
from train.report.profiler import DATA


@dataclass(frozen=True)
class StepCallbacks:
    """What an epoch calls: `report` with the step, an interval's mean loss and images/s, `after_step` after each step.

    `request` says after each step whether this rank wants to go on, save or stop. `save` is called if any rank wants
    to. `look` gets the images of the process's first step after it.
    """

    report: Callable[[int, float, float], None]
    request: Callable[[], int] = lambda: CONTINUE
    after_step: Callable[[], None] = lambda: None
    save: Callable[[], None] = lambda: None
    look: Callable[[Tensor], None] = lambda _: None


def train_epoch(
    trainer: Trainer,
    source: BatchSource,
    epoch: int,
    log_interval: int,
    callbacks: StepCallbacks,
    last_step: int | None = None,
) -> bool:
    """Train the rest of an epoch; return False if any rank's request stopped it.

    Losses stay on the device until a log interval ends. Then one collective sums them over the ranks. The run ends with
    `last_step`, if it has one. Raises `UserError` at the first loss that is not finite.
    """
    pending: list[Tensor] = []
    began = epoch * source.steps_per_epoch
    first, due = trainer.state.step - began, source.steps_per_epoch
    if last_step is not None:
        due = min(due, last_step - began)
    before, clocks = time.perf_counter(), trainer.meter.start()
    batches = islice(source.train_batches(epoch, first), max(0, due - first))
    while True:
        with trainer.mark_phase(DATA), trainer.meter.loading():
            batch = next(batches, None)
        if batch is None:
            return True
        agreed = trainer.group.all_reduce_max_async(callbacks.request())
        is_first = not trainer.first_step_seconds
        pending.append(timed_first_step(trainer, batch))
        if is_first:  # it compiles and warms up
            looked = time.perf_counter()
            callbacks.look(batch.micro_batches[0][0])
            before += time.perf_counter() - looked  # which is no training
            clocks, trainer.meter.data_s, trainer.meter.data_cpu_s = trainer.meter.start(), 0.0, 0.0
        wanted = agreed()
        callbacks.after_step()
        done = len(trainer.state.losses) + len(pending)
        if len(pending) < log_interval and done < due and wanted == CONTINUE:
            continue
        trainer.gpu_clock.sample()  # while the GPU still computes
        trainer.energy.sample()
        losses = trainer.group.sum(torch.stack(pending)).tolist()
        losses = check_finite(trainer, losses)
        now = time.perf_counter()
        callbacks.report(trainer.state.step, sum(losses) / len(losses), batch.size * len(losses) / (now - before))
        trainer.state.seconds += now - before
        trainer.state.losses += losses
        clocks = trainer.meter.add(clocks, len(losses))
        pending, before = [], now
        if wanted == SAVE:
            callbacks.save()
            clocks = trainer.meter.start()
        if wanted == STOP:
            return False


def timed_first_step(trainer: Trainer, batch: Batch) -> Tensor:
    """Take a step; time the process's first step separately, because it compiles and warms up."""
    if trainer.first_step_seconds:
        return trainer.train_step(batch)
    began = time.perf_counter()
    try:
        loss = trainer.train_step(batch)
    except RuntimeError as error:
        raise compile_error(trainer.settings.compute, error) or error from None
    loss.item()
    trainer.first_step_seconds = time.perf_counter() - began
    return loss


def check_finite(trainer: Trainer, losses: list[float]) -> list[float]:
    """Return the losses of the last steps, that of a skipped step as the one before; steps count from 1.

    Raises `UserError` at a loss that is NaN or infinite where TRAIN_SKIP_NONFINITE does not skip that step.
    """
    checked = trainer.state.losses[-1:] or [0.0]
    for step, loss in enumerate(losses, trainer.state.step - len(losses) + 1):
        trainer.skipped = 0 if math.isfinite(loss) else trainer.skipped + 1
        if trainer.skipped > trainer.settings.optim.skip_nonfinite:
            in_a_row = f", as those of the {trainer.skipped - 1} steps before" if trainer.skipped > 1 else ""
            raise UserError(
                f"step {step}: the loss is {loss}{in_a_row}. Lower TRAIN_LR or set TRAIN_MAX_GRAD_NORM=1.",
                ExitCode.RANK_FAILED,
            )
        trainer.state.skipped_steps += trainer.skipped > 0
        if trainer.skipped and trainer.group.is_main:
            write_stderr(f"train: step {step} is skipped: its loss or gradients are not finite")
        checked.append(checked[-1] if trainer.skipped else loss)
    return checked[1:]
