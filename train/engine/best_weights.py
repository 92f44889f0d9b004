"""Take the best weights in place of the last ones at the end of a run, where val images have chosen them."""

from __future__ import annotations

from pathlib import Path

from train.checkpoint.folder import FOLDER, best_checkpoint, checkpoint_path
from train.checkpoint.metadata import EMA, MODEL, CorruptCheckpoint
from train.checkpoint.resume import ResumePoint, load
from train.engine.builder import load_module
from train.engine.run_setup import TrainingRun


def use_best_weights(run: TrainingRun) -> int | None:
    """Load the weights that did best on the val images; return the epochs that they had, None where the last stay.

    All ranks must call this. The last weights stay if they are the best, if test images chose, where IPEX has packed
    them, and where the model was pruned.
    """
    has_other_form = run.model_builder.plan.the_trainer().use_ipex or run.settings.network.prune_ratio
    if not run.source.has_val or not run.settings.run.checkpoint_every or has_other_form:
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
