"""Save checkpoints of a run, check that it may save, and take its best weights at the end."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from entrypoint.core.errors import ExitCode, UserError
from train.checkpoint import folder as folders
from train.checkpoint.folder import FOLDER, best_checkpoint, checkpoint_path
from train.checkpoint.metadata import EMA, MODEL, NO_BEST, OPTIMIZER, CorruptCheckpoint, Metadata, ScalerState
from train.checkpoint.optimizer_state import optimizer_tensors
from train.checkpoint.resume import ResumePoint, load
from train.checkpoint.tensor_files import Checkpoint, save_checkpoint
from train.distributed.ddp import iter_local_parameters
from train.distributed.exchange import all_gather_values, broadcast_value
from train.engine.builder import load_module
from train.engine.run_setup import TrainingRun
from train.engine.train_step import Trainer
from train.optimization.optimizer import parameter_names
from train.preemption import OF_ANOTHER_RANK, STOP_CONTROLLER, Preempted
from train.report.metrics import disk_errors_as_user_errors
from train.report.trackers import PREEMPTED

# What is left of the grace period for the end of all ranks, after an upload.
UPLOAD_MARGIN_S = 2.0


def save_and_exit(run: TrainingRun, epochs: int) -> NoReturn:
    """Save a checkpoint of the current step, then raise `Preempted`.

    All ranks wait until it is saved. If one exited earlier, its launcher would stop the rank that still writes.
    """
    check_weights_finite(run.trainer)

    def write() -> None:
        save(run, epochs)
        run.checkpoint_writer.wait()

    reasons = run.group.gather(STOP_CONTROLLER.reason, str)
    reason = next((one for one in reasons if one != OF_ANOTHER_RANK), OF_ANOTHER_RANK)
    if run.settings.compute.parallelism == "ddp":
        run.group.run_on_main(write)
    else:
        write()
    if run.metrics:
        run.metrics.close()
        run.metrics.end_tracker(PREEMPTED)
    try:
        place = f"{finish_upload(run, time.monotonic())}/{folders.FOLDER}"
    except UserError as error:
        place = f"{run.folder / folders.FOLDER} alone ({error})"
    run.group.drain()
    raise Preempted(
        f"stopped by {reason}: step {run.trainer.state.step} is saved in {place}. Run it again with TRAIN_RESUME=auto."
    )


def finish_upload(run: TrainingRun, stopped_at: float = math.inf) -> str:
    """Upload the rest of a run in object storage, within the grace period of a stop, while all ranks wait.

    `stopped_at` is when another rank's stop reached this one (time.monotonic()). Return the run's place for its user;
    raises `UserError` on every rank if something is not uploaded.
    """
    if run.group.is_main:
        run.lock.upload()
    place, grace_s = None, max(1.0, run.model_builder.plan.grace_period_s - UPLOAD_MARGIN_S)
    while place is None:
        place = run.group.run_on_main(
            lambda: run.lock.finish_upload(run.folder, min(stopped_at, STOP_CONTROLLER.stopped_at) + grace_s),
            str | None,
        )
    return place


def save_on_signal(run: TrainingRun, epochs: int) -> None:
    """Save a checkpoint during an epoch because SIGUSR2 requested it; training continues."""
    STOP_CONTROLLER.mark_saved()
    check_weights_finite(run.trainer)
    save(run, epochs)
    run.checkpoint_writer.wait()
    run.progress.print(f"step {run.trainer.state.step} is saved in {run.folder / 'checkpoint'}, as SIGUSR2 requested")


def check_weights_finite(trainer: Trainer) -> None:
    """Raise `UserError` on every rank if any weight is NaN or infinite."""
    wrong = [name for name, part in iter_local_parameters(trainer.state.model) if not bool(part.isfinite().all())]
    said = next((names[0] for names in trainer.group.gather(wrong[:1], list[str]) if names), None)
    if said:
        raise UserError(
            f"step {trainer.state.step}: {said} is not finite. Lower TRAIN_LR or set TRAIN_MAX_GRAD_NORM=1.",
            ExitCode.RANK_FAILED,
        )


def check_steps_taken(trainer: Trainer) -> None:
    """Raise `UserError` on every rank where each step was skipped, so that nothing was learned."""
    if 0 < trainer.state.step == trainer.state.skipped_steps:
        raise UserError(
            f"step {trainer.state.step}: each step was skipped, as its loss or gradients were not finite. Lower"
            " TRAIN_LR or set TRAIN_MAX_GRAD_NORM=1.",
            ExitCode.RANK_FAILED,
        )


def check_run_lock(run: TrainingRun) -> None:
    """Raise `UserError` if another run owns the folder now."""
    if not run.lock.is_held and run.folder.is_dir():
        raise UserError(
            f"{run.folder}: another run owns this folder now, because it was started later or this one"
            " was suspended. Start this one again with another TRAIN_RUN_NAME; nothing more was saved."
        )


def save(run: TrainingRun, epoch: int, *, score: float | None = None, best: bool = False) -> None:
    """Save a checkpoint after `epoch` finished epochs, on rank 0, or on all ranks if the model is sharded.

    `score` is that of its weights, if they were evaluated.
    At the end, when the best weights are in place of the last ones, those are saved already.
    """
    if run.has_best_weights:
        return
    metadata = metadata_of(run, epoch, score)
    if run.settings.compute.parallelism != "ddp":
        run.group.run_on_main(lambda: check_run_lock(run))
        run.checkpoint_writer.wait()
        run.checkpoint_writer.submit(prepare_sharded_save(run, metadata, best=best))
        return
    state, settings, folder = run.trainer.state, run.settings, run.folder / folders.FOLDER
    tensors = {
        MODEL: state.model.state_dict(),
        OPTIMIZER: optimizer_tensors(state.optimizer, parameter_names(state.optimizer, state.model)),
        EMA: state.ema_model.state_dict() if state.ema_model else {},
    }
    if not run.group.is_main:
        return
    check_run_lock(run)
    checkpoint = Checkpoint(metadata, run.checkpoint_writer.snapshot(tensors))

    def write() -> None:
        with disk_errors_as_user_errors(folder):
            save_checkpoint(folder, checkpoint, (settings.run.keep_checkpoints, settings.run.keep_best), best=best)
        run.lock.upload()

    run.checkpoint_writer.submit(write)


def prepare_sharded_save(run: TrainingRun, metadata: Metadata, *, best: bool) -> Callable[[], None]:
    """Copy this rank's shards, and return what writes them; all ranks must call both.

    Raises `UserError` if a rank does not see the folder that rank 0 made. What is returned raises `UserError` on all
    ranks if a rank cannot write its file.
    """
    from train.engine import sharded_checkpoint as sharded  # the import is slow

    ranks, state, group, keep = run.group, run.trainer.state, run.save_group, (run.settings.run.keep_checkpoints, 1)
    path = folders.checkpoint_path(run.folder / folders.FOLDER, metadata.step)
    temp_dir = folders.temporary_path(path)
    ranks.broadcast_buffers(list(state.model.buffers()))
    run.copies.begin(path)
    if not all(ranks.gather(temp_dir.is_dir(), bool)):
        raise UserError(
            f"{path.parent}: not visible on every node, but every rank writes its shard there."
            " Set TRAIN_OUTPUT_DIR to a folder that all nodes share."
        )
    # Another name for each save: in storage it replaces no part of a checkpoint that is whole.
    file = f"rank-{ranks.rank:05d}-of-{ranks.world_size:05d}-{os.urandom(4).hex()}.safetensors"
    shards = {
        name: shard
        for name, shard in sharded.shards_of(sharded.sharded_tensors(state)[0], ranks).items()
        if shard.value.numel() and (shard.is_part or ranks.is_main)
    }
    copies = run.checkpoint_writer.snapshot({file: {name: shard.value for name, shard in shards.items()}})[file]
    stored = {name: replace(shard, value=copies[name]) for name, shard in shards.items()}

    def write() -> None:
        report = sharded.write_shards(temp_dir / file, stored, lambda file: run.copies.upload(file, path))
        reports = all_gather_values(report, sharded.WrittenShards, group) if group else [report]
        failed: UserError | None = None
        if ranks.is_main:
            failed = sharded.commit_reports(temp_dir, path, metadata, reports, keep, best=best)
        if group:
            failed = broadcast_value(failed, UserError | None, group)
        if failed:
            raise failed
        if ranks.is_main:
            run.lock.upload()

    return write


def metadata_of(run: TrainingRun, epoch: int, score: float | None) -> Metadata:
    """Return what a checkpoint says besides its tensors."""
    state = run.trainer.state
    scaler = state.scaler.state_dict()
    return Metadata(
        epoch=epoch,
        step=state.step,
        examples=(state.step - epoch * run.source.steps_per_epoch) * run.settings.optim.batch_size,
        seconds=state.seconds,
        best=state.best,
        score=score,
        losses=tuple(state.losses),
        stale_epochs=state.stale_epochs,
        best_metric=state.best_metric,
        skipped_steps=state.skipped_steps,
        scaler=ScalerState(scale=scaler["scale"], growth_tracker=scaler["_growth_tracker"]) if scaler else None,
        normalization=run.source.normalize.to_metadata(),
        settings=run.settings.to_json(),
        plan=json.loads(run.model_builder.plan.to_json()),
        data=run.data,
    )


def use_best_weights(run: TrainingRun) -> int | None:
    """Load the weights that did best on the val images; return the epochs that they had, None where the last stay.

    All ranks must call this. The last weights stay if they are the best, if test images chose, and where IPEX has
    packed them.
    """
    is_packed, no_best = run.model_builder.plan.the_trainer().use_ipex, run.trainer.state.best == NO_BEST
    if not run.source.has_val or not run.settings.run.checkpoint_every or is_packed or no_best:
        return None
    run.checkpoint_writer.wait()  # with FSDP each rank writes its part
    name = run.group.run_on_main(lambda: best_name(run), str)
    if not name:
        return None
    path, state = run.copies.fetch(run.folder / FOLDER / name), run.trainer.state
    best = run.group.run_on_main(lambda: read_best(run, path), ResumePoint | None)
    if best is None:
        return None
    if run.settings.compute.parallelism == "fsdp":
        from train.engine import sharded_checkpoint  # the import is slow

        sharded_checkpoint.load(path, state, run.group)
    else:
        load_module(state.model, MODEL, best)
        if state.ema_model:
            load_module(state.ema_model, EMA, best)
    run.has_best_weights = True
    return best.metadata.epoch


def best_name(run: TrainingRun) -> str:
    """Return the name of the best checkpoint, empty where it is the last one, which need not be read."""
    folder = run.folder / FOLDER
    name = best_checkpoint(folder).name
    return "" if name == checkpoint_path(folder, run.trainer.state.step).name else name


def read_best(run: TrainingRun, path: Path) -> ResumePoint | None:
    """Return the best checkpoint, None where it cannot be read any more."""
    try:
        return load(path, run.settings.to_json(), changed=True)
    except CorruptCheckpoint as error:
        run.progress.print(f"warning: the best checkpoint cannot be read, so the last weights are kept: {error.reason}")
        return None
