"""Train a run from settings and plan to its summary: data, model, epochs, outputs."""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import msgspec
import torch

from entrypoint.core.errors import ExitCode, UserError, refuse_if
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Plan
from train.data.datasets import DataSet, load
from train.data.feeds.choose import build_loader
from train.data.workers import WorkerSpec
from train.distributed.peers import translate_collective_errors
from train.distributed.process_group import init_process_group, local_process
from train.engine.finish import write_summary
from train.engine.loop import StepCallbacks, train_epoch
from train.engine.run_setup import TrainingRun, setup_run
from train.engine.save_policy import (
    check_weights_finite,
    finish_upload,
    save,
    save_and_exit,
    save_on_signal,
    use_best_weights,
)
from train.evaluation.evaluate import MistakeCollector, evaluate
from train.evaluation.heat_map import MAX_PROJECTED_CLASSES, PROJECTED
from train.evaluation.results import EvalMethod, EvalResult
from train.evaluation.trained_model import evaluate_trained
from train.lock_file import STALE_S, RunLock
from train.optimization.losses import evaluation_loss
from train.preemption import STOP_CONTROLLER, first_deadline, watch_for_notice
from train.report.progress import guarded_stdout
from train.report.stored_run import make_lock
from train.report.trackers import FAILED
from train.seeding import seed_python
from train.settings import TrainSettings
from train.transforms.normalize import resize_batches


def train(given: ParsedSettings[TrainSettings], plan: Plan, started: float) -> None:
    """Train by the settings on this rank's share; `started` is the start of the whole command (Unix time, s).

    Raises `UserError` for unusable input and for a loss that is not finite.
    """
    settings = given.values
    seed_and_set_determinism(settings)
    data = load_data(settings, plan)
    group = local_process(plan)
    # All ranks wait for rank 0, which acquires it.
    stale_s = min(STALE_S, plan.collective_timeout_s / 2)
    lock = make_lock(given, stale_s) if group.is_main else RunLock(stale_s=stale_s)
    with lock, build_loader(data, settings, group, plan) or nullcontext() as loader:
        group = init_process_group(group, plan)
        try:
            with translate_collective_errors(group.rank, group.peers):
                if settings.run.evaluate:
                    evaluate_trained(settings, plan, data, loader, group)
                else:
                    train_run(setup_run(given, plan, data, loader, group, lock), started)
            group.drain()  # not after a failure, which must be reported without delay
        finally:
            group.destroy()


def train_run(run: TrainingRun, started: float) -> None:
    """Train a run that is set up, and write what it leaves."""
    settings = run.settings
    try:
        deadline = first_deadline(settings.run.max_minutes, run.model_builder.plan.grace_period_s, started, os.environ)
        with STOP_CONTROLLER.defer(can_save=settings.run.checkpoint_every > 0, deadline=deadline):
            if settings.run.checkpoint_every and run.group.local_rank == 0:
                watch_for_notice(settings.run.preemption)
            test, val, best_epoch = train_epochs(run)
            write_summary(run, test, val, best_epoch, started)
            place = finish_upload(run)
            if place != str(run.folder) and run.group.is_main and settings.run.progress != "off":
                with guarded_stdout():
                    print(f"{'uploaded to':14} {place}")
    except BaseException:
        if run.metrics:
            run.metrics.end_tracker(FAILED)
        raise
    finally:
        run.progress.close()


def seed_and_set_determinism(settings: TrainSettings) -> None:
    """Seed the generators, and select deterministic kernels if TRAIN_DETERMINISTIC is set."""
    torch.manual_seed(settings.optim.seed)
    seed_python(settings.optim.seed)
    if settings.compute.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(mode=True)
    elif torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True


def load_data(settings: TrainSettings, plan: Plan) -> DataSet:
    """Return the data set; raises `UserError` if it is smaller than a batch."""
    workers = WorkerSpec(
        frozenset(cpu for rank in plan.ranks for cpu in rank.cpus), sum(rank.threads for rank in plan.ranks)
    )
    channels, height, width = plan.the_trainer().image_shape
    data = load(settings, (channels, height, width), plan.the_trainer().data_source, workers)
    count, tested = data.trained_images, len(data.test)
    batch, ranks = settings.optim.batch_size, plan.nodes.world_size
    refuse_if(
        {
            f"TRAIN_PARALLELISM=fsdp: {tested} test images for {ranks} ranks, of which each needs one. Lower"
            " LAUNCH_NPROC_PER_NODE, or add test images.": settings.compute.parallelism == "fsdp" and tested < ranks,
            f"TRAIN_BATCH_SIZE={batch}: larger than the training set of {count} images. Lower it.": (
                count < batch and not settings.run.evaluate
            ),
        }
    )
    return data


def train_epochs(run: TrainingRun) -> tuple[EvalResult, EvalResult | None, int | None]:
    """Train the remaining epochs with evaluation, log and checkpoint after each; return the last results.

    They are on the test images, and on those that chose the best checkpoint, if others. Then comes the epoch after
    which the weights were the best, None for the last ones.
    Raises `Preempted` after saving a checkpoint if any rank got a stop request.
    """
    score: EvalResult | None = None
    for epoch in range(run.first_epoch, run.epochs):
        if should_stop_early(run):
            break
        network = run.settings.network
        if network.prune_ratio and epoch >= network.prune_warmup and not run.trainer.state.pruned:
            run.progress.print(run.model_builder.prune(run.trainer))

        callbacks = StepCallbacks(
            report=partial(report_steps, run, epoch),
            request=lambda: STOP_CONTROLLER.request,
            after_step=run.advance_profiler,
            save=partial(save_on_signal, run, epoch),
            look=partial(run.live.show_batch, undo=run.source.normalize.undo) if run.live else (lambda _: None),
        )
        if not train_epoch(run.trainer, run.source, epoch, run.log_interval, callbacks, run.total_steps):
            save_and_exit(run, epoch)
        is_due = (epoch + 1) % run.settings.run.eval_every == 0 or epoch + 1 == run.epochs
        score = evaluate_run(run, epoch) if is_due else None
        finish_epoch(run, epoch + 1, score)
    if not score:
        score = evaluate_run(run, run.epochs)
    if not run.source.has_val:
        return score, None, None
    best_epoch = use_best_weights(run)
    if best_epoch is not None:
        score = evaluate_run(run, run.epochs)
    return evaluate_run(run, run.epochs, test=True), score, best_epoch


def report_steps(run: TrainingRun, epoch: int, step: int, loss: float, speed: float) -> None:
    """Show the mean loss and images/s of the steps up to `step`, and note them."""
    left_s = (run.total_steps - step) * run.settings.optim.batch_size / speed
    run.progress.update(epoch, step, loss, speed, left_s)
    if run.metrics:
        place = epoch + (step - epoch * run.source.steps_per_epoch) / run.source.steps_per_epoch
        values = {"epoch": round(place, 4), "loss": loss, "images_per_second": round(speed, 1)}
        if run.trainer.grad_norm is not None and run.trainer.grad_norm.isfinite():
            values["grad_norm"] = float(run.trainer.grad_norm)
        run.metrics.write("step", step, {**values, "lr": run.trainer.lr(step - 1)})


def should_stop_early(run: TrainingRun) -> bool:
    """Return whether the score has not improved for TRAIN_EARLY_STOPPING epochs, and print it."""
    patience, stale = run.settings.optim.early_stopping, run.trainer.state.stale_epochs
    is_whole = run.settings.network.prune_ratio and not run.trainer.state.pruned
    if not patience or stale < patience or is_whole:
        return False
    run.progress.print(f"stopping early: {run.choice} {run.settings.data.score} has not improved for {stale} epochs")
    return True


def note_improvement(run: TrainingRun, score: EvalResult) -> None:
    """Count the epochs since the score of early stopping improved."""
    state = run.trainer.state
    if state.best_metric is None or score.accuracy > state.best_metric:
        state.best_metric, state.stale_epochs = score.accuracy, 0
    else:
        state.stale_epochs += run.settings.run.eval_every


def evaluate_run(run: TrainingRun, epochs: int, *, test: bool = False) -> EvalResult:
    """Evaluate the model after `epochs` finished epochs; raises `Preempted` as `train_epochs` does.

    The images are those that choose the best checkpoint, or with `test` the test images.
    Raises `UserError` for a loss that is not finite, before anything calls this epoch the best.
    """
    shown = PROJECTED if len(run.data.classes) <= MAX_PROJECTED_CLASSES else 1
    run.mistakes = MistakeCollector(run.source.normalize, every=-(-len(run.dataset.test) // shown))
    chooses = run.settings.run.threshold == "auto" and run.source.has_val and not test
    source, rows = run.source, run.source.rows
    on_val = rows.val is not None and not test
    batches = source.eval_batches(rows.val_is_in, rows.val) if on_val else source.test_batches()
    score = evaluate(
        run.trainer.state.eval_model,
        resize_batches(batches, run.model_builder.sizes.eval),
        run.group,
        EvalMethod(
            run.trainer.precision,
            len(run.data.classes),
            run.settings.run.test_time_augment,
            evaluation_loss(run.model_builder.loss),
            run.source.normalize.outputs,
            chooses=chooses,
        ),
        stop=lambda: STOP_CONTROLLER.stop_requested,
        look=run.mistakes.add if run.settings.data.task == "classify" else None,
    )
    if score is None:
        save_and_exit(run, epochs)
    if chooses:  # also for the test that follows
        chosen = {name: score.others[name] for name in ("threshold", "temperature") if name in score.others}
        outputs = msgspec.structs.replace(run.source.normalize.outputs, **chosen)
        run.source.normalize = replace(run.source.normalize, outputs=outputs)
    if not math.isfinite(score.loss):
        check_weights_finite(run.trainer)  # a broken weight is the cause, so its name is the better message
        raise UserError(
            f"step {run.trainer.state.step}: the {'test' if test else run.choice} loss is {score.loss}. Lower"
            " TRAIN_LR or set TRAIN_MAX_GRAD_NORM=1; the checkpoints before it are kept.",
            ExitCode.RANK_FAILED,
        )
    return score


def finish_epoch(run: TrainingRun, epoch: int, score: EvalResult | None) -> None:
    """Log a finished epoch, evaluated or not, and save a checkpoint; raises `UserError` if a weight is not finite."""
    loss = sum(run.trainer.state.losses) / max(1, len(run.trainer.state.losses))
    # TRAIN_STEPS may cut the last epoch. A run with more steps resumes inside of it.
    is_complete = run.trainer.state.step >= epoch * run.source.steps_per_epoch
    if is_complete:
        run.trainer.state.losses = []
    values = {"epoch": epoch, "train_loss": loss}
    joules = [each for each in run.group.gather(run.trainer.energy.joules, float | None) if each is not None]
    if joules:
        values["joules"] = sum(joules)
    line = f"epoch {epoch}/{run.epochs}  train loss {loss:.4f}"
    if score:
        name = f"{run.choice} {run.settings.data.score}"
        line += f"  {run.choice} loss {score.loss:.4f}  {name} {score.accuracy:.2f} %"
        values |= {f"{run.choice}_loss": score.loss, name.replace(" ", "_"): score.accuracy}
        values |= {f"{run.choice}_{other}": value for other, value in score.others.items()}
        note_improvement(run, score)
    run.progress.print(line)
    if run.metrics and run.live:
        run.metrics.write("epoch", run.trainer.state.step, values)
        known = {
            "epochs": epoch,
            "train_seconds": run.trainer.state.seconds,
            "best_chosen_on": run.choice,
            "score": run.settings.data.score,
        }
        run.live.show_epoch(known | {key: value for key, value in values.items() if key.startswith(run.choice)})
    every = run.settings.run.checkpoint_every
    stops = run.settings.optim.early_stopping and run.trainer.state.stale_epochs >= run.settings.optim.early_stopping
    best = score is not None and score.accuracy > run.trainer.state.best
    if every and (best or epoch % every == 0 or epoch == run.epochs or stops):
        check_weights_finite(run.trainer)
        if score:
            run.trainer.state.best = max(run.trainer.state.best, score.accuracy)
        save(run, epoch if is_complete else epoch - 1, score=score.accuracy if score else None, best=best)
    run.heap.trim_if_due()
