"""When a run saves its checkpoints, and what it refuses to save."""

from __future__ import annotations

from typing import Any, NoReturn

from entrypoint.core.errors import ExitCode, UserError
from train.checkpoint import single_file
from train.checkpoint.async_writer import snapshot
from train.checkpoint.single_file import Checkpoint
from train.distributed.ddp import iter_local_parameters
from train.engine.run import TrainingRun
from train.engine.train_step import Trainer
from train.preemption import STOP_CONTROLLER, Preempted


def save_and_exit(run: TrainingRun, epochs: int) -> NoReturn:
    """Save where all ranks stand and end, to go on from there.

    All wait until it is saved: a rank that ended sooner would have its launcher end the one that still writes.
    """
    check_weights_finite(run.trainer)

    def write() -> None:
        save(run, epochs)
        run.checkpoint_writer.wait()

    if run.settings.parallelism == "ddp":
        run.group.run_on_main(write)
    else:
        write()
    if run.metrics:
        run.metrics.close()
    run.group.drain()
    raise Preempted(
        f"stopped by {STOP_CONTROLLER.reason}: step {run.trainer.step} is saved in {run.folder / 'checkpoint'};"
        " run it again with TRAIN_RESUME=auto"
    )


def save_on_signal(run: TrainingRun, epochs: int) -> None:
    """Save where all ranks stand, amid an epoch, because a signal asked for it; then go on."""
    STOP_CONTROLLER.mark_saved()
    check_weights_finite(run.trainer)
    save(run, epochs)
    run.checkpoint_writer.wait()
    run.progress.print(f"step {run.trainer.step} is saved in {run.folder / 'checkpoint'}, as SIGUSR2 asks for")


def check_weights_finite(trainer: Trainer) -> None:
    """Refuse on every rank to save weights that are no numbers: the checkpoint before is the last good one."""
    wrong = [name for name, part in iter_local_parameters(trainer.model) if not bool(part.isfinite().all())]
    said = next((names[0] for names in trainer.group.gather(wrong[:1]) if names), None)
    if said:
        raise UserError(
            f"step {trainer.step}: {said} is no longer finite; lower TRAIN_LR, or set TRAIN_MAX_GRAD_NORM=1",
            ExitCode.RANK_FAILED,
        )


def check_run_lock(run: TrainingRun) -> None:
    """Refuse to save where another run has taken the folder."""
    if not run.lock.is_held and run.folder.is_dir():
        raise UserError(
            f"{run.folder}: another run has taken it over, since this one stood still; nothing is saved here"
        )


def save(run: TrainingRun, epoch: int, *, best: bool = False) -> None:
    """Save a checkpoint of the run, so many of its epochs closed: rank 0 does, or all ranks where it is sharded."""
    trainer = run.trainer
    whole: dict[str, Any] = {"model": {}, "optimizer": {}}
    if run.settings.parallelism == "ddp":
        whole = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
        whole["average"] = trainer.ema_model.state_dict() if trainer.ema_model else {}
        whole = snapshot(whole) if run.group.is_main else whole
    made = Checkpoint(
        epoch=epoch,
        step=trainer.step,
        seconds=trainer.seconds,
        losses=tuple(trainer.losses),
        scaler=trainer.scaler.state_dict(),
        settings=run.settings.to_json(),
        best=trainer.best,
        plan=run.model_builder.plan.to_json(),
        **whole,
    )
    folder = run.folder / "checkpoint"
    if run.settings.parallelism != "ddp":
        from train.checkpoint import sharded

        run.group.run_on_main(lambda: check_run_lock(run))
        sharded.save(folder, made, trainer.sharded_state(), run.settings.keep_checkpoints, best=best)
        return
    if not run.group.is_main:
        return
    check_run_lock(run)

    def write() -> None:
        try:
            single_file.save(folder, made, run.settings.keep_checkpoints, best=best)
        except OSError as error:
            raise single_file.write_error(folder, error) from None

    run.checkpoint_writer.submit(write)
