"""When a run saves its checkpoints, and what it refuses to save."""

from __future__ import annotations

from typing import Any, NoReturn

from entrypoint.errors import Exit, Refused
from train import checkpoint
from train.checkpoint import Checkpoint
from train.loop import Learner
from train.run import Run
from train.stopping import STOPPING, Preempted


def preempt(run: Run, epochs: int) -> NoReturn:
    """Save where all ranks stand and end, to go on from there.

    All wait until it is saved: a rank that ended sooner would have its launcher end the one that still writes.
    """
    check_weights(run.learner)
    run.group.from_leader(lambda: save(run, epochs))
    if run.recorder:
        run.recorder.close()
    raise Preempted(
        f"stopped by {STOPPING.name}: step {run.learner.step} is saved in {run.folder / 'checkpoint'};"
        " run it again with TRAIN_RESUME=auto"
    )


def check_weights(learner: Learner) -> None:
    """Refuse to save weights that are no numbers: the checkpoint before is the last good one."""
    for name, parameter in learner.model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise Refused(
                f"step {learner.step}: {name} is no longer finite; lower TRAIN_LR, or set TRAIN_CLIP_NORM=1",
                Exit.RANK_FAILED,
            )


def save(run: Run, epoch: int) -> None:
    """Save a checkpoint of the run, so many of its epochs closed."""
    learner = run.learner
    state: dict[str, Any] = {
        "model": learner.model.state_dict(),
        "optimizer": learner.optimizer.state_dict(),
        "settings": run.settings.model_dump(mode="json"),
    }
    try:
        checkpoint.save(
            run.folder / "checkpoint",
            Checkpoint(epoch=epoch, step=learner.step, seconds=learner.seconds, losses=tuple(learner.losses), **state),
            run.settings.keep,
        )
    except OSError as error:
        raise Refused(
            f"{run.folder / 'checkpoint'}: cannot be written ({error.strerror}); the checkpoints before are kept",
            Exit.MACHINE,
        ) from None
