"""Train a run from settings and plan to its summary: data, model, epochs, outputs."""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial

import torch

from entrypoint.core.errors import UserError
from entrypoint.core.settings_base import ParsedSettings
from entrypoint.plan.model import Plan
from entrypoint.rank.verify import compare_with_plan, observe_rank
from train.checkpoint import single_file
from train.checkpoint.async_writer import AsyncCheckpointWriter
from train.data.datasets import DataSet, load
from train.data.loader import BatchLoader
from train.data.workers import WorkerPoolSpec, translate_worker_death
from train.distributed.ddp import not_resumable_warnings
from train.distributed.peer_failure import translate_collective_errors
from train.distributed.process_group import ProcessGroup, init_process_group, local_process
from train.engine.builder import ModelBuilder, build_loader, build_source
from train.engine.compile import compile_step
from train.engine.evaluate import EvalResult, evaluate
from train.engine.finish import write_summary
from train.engine.loop import train_epoch
from train.engine.run import TrainingRun
from train.engine.save_policy import check_weights_finite, save, save_and_exit, save_on_signal
from train.engine.train_step import Trainer
from train.lock_file import STALE_S, RunLock
from train.preemption import STOP_CONTROLLER, first_deadline
from train.report import run_folder
from train.report.metrics import MetricsWriter, disk_errors_as_user_errors
from train.report.profiler import Profiler
from train.report.progress import build_progress
from train.settings import TrainSettings
from train.transforms.registry import select_transform


def train(given: ParsedSettings[TrainSettings], plan: Plan, started: float) -> None:
    """Train by the settings on this rank's share; `started` is the start of the whole command (Unix time, s).

    Raises `UserError` for unusable input and for a loss that is not finite.
    """
    settings = given.values
    seed_and_set_determinism(settings)
    data = load_data(settings, plan)
    group = local_process(plan)
    with build_loader(data, settings, group, plan) or nullcontext() as loader:
        train_distributed(init_process_group(group, plan), given, plan, data, loader, started)


def train_distributed(
    group: ProcessGroup,
    given: ParsedSettings[TrainSettings],
    plan: Plan,
    data: DataSet,
    loader: BatchLoader | None,
    started: float,
) -> None:
    """Train as one rank of an initialized process group."""
    settings = given.values
    try:
        lock = RunLock(
            stale_s=min(STALE_S, plan.collective_timeout_s / 2)
        )  # all ranks wait for rank 0, which acquires it
        with translate_collective_errors(group.rank, group.peers), translate_worker_death(), lock:
            run = setup_run(given, plan, data, loader, group, lock)
            try:
                deadline = first_deadline(settings.max_minutes, plan.grace_period_s, started, os.environ)
                with STOP_CONTROLLER.defer(can_save=settings.checkpoint_every > 0, deadline=deadline):
                    score = train_epochs(run)
                    write_summary(run, score, plan, started)
            finally:
                run.progress.close()
        group.drain()  # not after a failure, which must be reported without delay
    finally:
        group.destroy()


def seed_and_set_determinism(settings: TrainSettings) -> None:
    """Seed the generators, and select deterministic kernels if TRAIN_DETERMINISTIC is set."""
    torch.manual_seed(settings.seed)
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    elif torch.cuda.is_available():
        torch.backends.cudnn.benchmark = True


def load_data(settings: TrainSettings, plan: Plan) -> DataSet:
    """Return the data set; raises `UserError` if it is smaller than a batch."""
    worker_pool = WorkerPoolSpec(
        frozenset(cpu for rank in plan.ranks for cpu in rank.cpus), sum(rank.threads for rank in plan.ranks)
    )
    channels, height, width = plan.the_trainer().image_shape
    data = load(settings, (channels, height, width), plan.the_trainer().data_source, worker_pool)
    count, tested = len(data.train), len(data.test)
    if settings.parallelism == "fsdp" and tested < plan.nodes.world_size:
        raise UserError(
            f"TRAIN_PARALLELISM=fsdp: {tested} test images for {plan.nodes.world_size} ranks, which evaluate a model"
            " together;"
            " each"
            " needs one at least"
        )
    if count < settings.batch_size:
        raise UserError(
            f"TRAIN_BATCH_SIZE={settings.batch_size}: larger than the training set of {count} images. Lower it."
        )
    return data


def setup_run(
    given: ParsedSettings[TrainSettings],
    plan: Plan,
    data: DataSet,
    loader: BatchLoader | None,
    group: ProcessGroup,
    lock: RunLock,
) -> TrainingRun:
    """Build the run's model, data source and outputs, and resume from a checkpoint if there is one."""
    settings = given.values
    source = build_source(data, loader, settings, group)
    total_steps, epochs = settings.total_steps(source.steps_per_epoch), settings.total_epochs(source.steps_per_epoch)
    if settings.prune_ratio and settings.prune_warmup >= epochs:
        raise UserError(
            f"TRAIN_PRUNE_WARMUP={settings.prune_warmup}: TRAIN_STEPS={settings.steps} are {epochs} epochs; lower it,"
            " so that the pruned model is trained on"
        )
    folder, starts = group.run_on_main(lambda: run_folder.open_folder(settings, lock))
    wanted, changed = settings.to_json(), settings.resume_allow_changed
    # Rank 0 reads and broadcasts it: the folder may be on a local disk of its node.
    start = group.run_on_main(lambda: single_file.load_first_valid(starts, wanted, changed=changed)) if starts else None
    if start:
        single_file.check_classes(start, data.classes, changed=changed)
    seen_shape = select_transform(settings, data.shape[0]).shape(data.shape)
    model_builder = ModelBuilder(settings, plan, seen_shape, len(data.classes), group, source.sample)
    trainer = model_builder.create_trainer(total_steps, start)
    first_epoch = start.saved.epoch if start else 0
    check_trainable(model_builder, trainer, first_epoch, epochs)
    seen = observe_rank(plan)
    ranks = group.gather(seen)
    surprises = group.gather(compare_with_plan(plan, seen))  # each rank compares with its own node's plan
    metrics: MetricsWriter | None = None
    if group.is_main:
        with disk_errors_as_user_errors(folder):
            run_folder.write_provenance(folder, given, plan, os.environ)
            run_folder.write_ranks(folder, ranks)
            resumed_step = start.saved.step if start else None
            metrics = MetricsWriter(folder, tensorboard=settings.tensorboard, resumed_step=resumed_step)
    progress = build_progress(settings, total_steps, epochs, is_main=group.is_main, relayed=plan.launcher == "rank")
    before = (*start.skipped, *not_resumable_warnings(settings, group)) if start else ()
    for line in (*before, *(line for lines in surprises for line in lines)):
        progress.print(f"warning: {line}")
    if data.skipped:
        count = len(data.skipped)
        what = "1 unreadable image is" if count == 1 else f"{count:,} unreadable images are"
        progress.print(f"{what} left out, first {data.skipped[0]}")
    if start:
        progress.print(f"resuming from {start.path}, epoch {first_epoch + 1}, step {trainer.state.step}")
    run = TrainingRun(
        settings,
        group,
        source,
        trainer,
        folder,
        metrics,
        progress,
        first_epoch,
        model_builder,
        lock,
        AsyncCheckpointWriter(),
        data.classes,
        data.skipped,
    )
    compile_and_profile(run, total_steps, plan)
    return run


def check_trainable(model_builder: ModelBuilder, trainer: Trainer, first_epoch: int, epochs: int) -> None:
    """Raise `UserError` before the first epoch for a micro-batch or a pruning that this model does not allow."""
    settings = model_builder.settings
    model_builder.check_smallest_micro_batch()
    if not settings.prune_ratio or trainer.state.pruned:
        return
    if first_epoch >= epochs:
        raise UserError(
            f"TRAIN_PRUNE_RATIO={settings.prune_ratio}: all {epochs} epochs are trained already, without pruning."
            " Raise TRAIN_EPOCHS."
        )
    model_builder.try_pruning()


def compile_and_profile(run: TrainingRun, total_steps: int, plan: Plan) -> None:
    """Compile the step and start the profiler, if enabled."""
    if run.settings.compile != "off" and run.trainer.state.step < total_steps:
        (images, _), *_ = next(run.source.train_batches(0)).micro_batches
        compile_result = compile_step(run.trainer, total_steps - run.trainer.state.step, images)
        run.progress.print(compile_result)
    if run.settings.profile and run.group.is_main:
        run.profiler = Profiler(
            run.settings.profile, run.folder, plan.the_trainer().data_source, run.group.device, run.progress.print
        )
        run.trainer.mark_phase = run.profiler.phase


def train_epochs(run: TrainingRun) -> EvalResult:
    """Train the remaining epochs with evaluation, log and checkpoint after each; return the last result.

    Raises `Preempted` after saving a checkpoint if any rank got a stop request.
    """
    score: EvalResult | None = None
    total = run.total_steps
    for epoch in range(run.first_epoch, run.epochs):
        if run.settings.prune_ratio and epoch >= run.settings.prune_warmup and not run.trainer.state.pruned:
            run.progress.print(run.model_builder.prune(run.trainer))

        def report(step: int, loss: float, speed: float, epoch: int = epoch) -> None:
            left_s = (total - step) * run.settings.batch_size / speed
            run.progress.update(epoch, step, loss, speed, left_s)
            if run.metrics:
                place = epoch + (step - epoch * run.source.steps_per_epoch) / run.source.steps_per_epoch
                values = {"epoch": round(place, 4), "loss": loss, "images_per_second": round(speed, 1)}
                run.metrics.write("step", step, {**values, "lr": run.trainer.lr(step - 1)})

        if not train_epoch(
            run.trainer,
            run.source,
            epoch,
            run.log_interval,
            report,
            lambda: STOP_CONTROLLER.request,
            run.advance_profiler,
            partial(save_on_signal, run, epoch),
            total,
        ):
            save_and_exit(run, epoch)
        score = evaluate_run(run, epoch)
        finish_epoch(run, epoch + 1, score)
    return score or evaluate_run(run, run.epochs)


def evaluate_run(run: TrainingRun, epochs: int) -> EvalResult:
    """Evaluate the model after `epochs` finished epochs; raises `Preempted` as `train_epochs` does."""
    score = evaluate(
        run.trainer.state.eval_model,
        run.source.test_batches(),
        run.group,
        run.trainer.precision,
        lambda: STOP_CONTROLLER.stop_requested,
    )
    if score is None:
        save_and_exit(run, epochs)
    return score


def finish_epoch(run: TrainingRun, epoch: int, score: EvalResult) -> None:
    """Log a finished epoch and save a checkpoint; raises `UserError` if a weight is not finite."""
    loss = sum(run.trainer.state.losses) / max(1, len(run.trainer.state.losses))
    cut = (
        run.trainer.state.step < epoch * run.source.steps_per_epoch
    )  # by TRAIN_STEPS; a run with more steps resumes inside this epoch
    run.trainer.state.losses = run.trainer.state.losses if cut else []
    run.progress.print(
        f"epoch {epoch}/{run.epochs}  train loss {loss:.4f}  test loss {score.loss:.4f}"
        f"  test accuracy {score.accuracy:.2f} %"
    )
    if run.metrics:
        values = {
            "epoch": epoch,
            "train_loss": loss,
            "test_loss": score.loss,
            "test_accuracy": score.accuracy,
        }
        run.metrics.write("epoch", run.trainer.state.step, values)
    every = run.settings.checkpoint_every
    if every and (epoch % every == 0 or epoch == run.epochs):
        check_weights_finite(run.trainer)
        best = score.accuracy > run.trainer.state.best
        run.trainer.state.best = max(run.trainer.state.best, score.accuracy)
        save(run, epoch - cut, best=best)
