"""Choose the checkpoint that a run resumes from, and find its place in the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from entrypoint.core.errors import UserError, printable
from train.checkpoint.metadata import (
    NO_BEST,
    SECTIONS,
    CorruptCheckpoint,
    DataFingerprint,
    Metadata,
    check_data,
    check_end,
    compare_settings,
)
from train.checkpoint.tensor_files import Checkpoint, CheckpointReader


@dataclass(frozen=True)
class ResumePoint:
    """Checkpoint that a run resumes from.

    `skipped` has one line for each corrupt one that was passed over, and `changes` one for each accepted difference.
    `step` and `epoch` are its place in this run.
    """

    path: Path
    checkpoint: Checkpoint
    skipped: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    losses: tuple[float, ...] = ()

    @property
    def metadata(self) -> Metadata:
        """The checkpoint's metadata."""
        return self.checkpoint.metadata


def load_first_valid(paths: Sequence[Path], settings: Mapping[str, Any], *, changed: bool) -> ResumePoint:
    """Return the first valid checkpoint; raises `UserError` if none is valid or its settings differ (see `load`)."""
    skipped: list[CorruptCheckpoint] = []
    for path in paths:
        try:
            return replace(
                load(path, settings, changed=changed), skipped=tuple(f"skipped {one.reason}" for one in skipped)
            )
        except CorruptCheckpoint as error:
            skipped.append(error)
    if len(skipped) == 1:
        raise skipped[0]
    raise UserError(
        f"{skipped[0].reason}; {len(skipped) - 1} older checkpoints are corrupt too."
        " Set TRAIN_RESUME=off to start a new run."
    )


def load(path: Path, settings: Mapping[str, Any], *, changed: bool = False) -> ResumePoint:
    """Read a checkpoint to the CPU; raises `CorruptCheckpoint` if it is missing or corrupt.

    A sharded one is verified only: each rank reads its own tensors later. Raises `UserError` if the settings differ,
    unless `changed` allows it, and in any case if it must not.
    """
    reader = CheckpointReader(path)
    found = reader.metadata
    changes = compare_settings(path, found, settings, changed=changed)
    if settings.get("parallelism") == "fsdp":
        reader.verify_files()
        checkpoint = Checkpoint(found)
    else:
        checkpoint = Checkpoint(found, reader.whole())
    return ResumePoint(path, checkpoint, (), changes, found.epoch, found.step, found.losses)


def with_own_best(start: ResumePoint, folder: Path) -> ResumePoint:
    """Return the resume point of the run of a folder, without the best score of another run: it has those weights."""
    before = start.path.resolve().parent
    if before.parent == folder.resolve() or start.metadata.best == NO_BEST:
        return start
    return replace(
        start,
        checkpoint=replace(start.checkpoint, metadata=msgspec.structs.replace(start.metadata, best=NO_BEST)),
        changes=(*start.changes, f"the best checkpoint stays in {before}"),
    )


def compare_data(start: ResumePoint, now: DataFingerprint, *, changed: bool) -> ResumePoint:
    """Return the resume point with the accepted differences of the data; raises `UserError` for the others."""
    differ = check_data(start.path, start.metadata.data, now, changed=changed)
    return without_scores(start, differ) if differ else start


def without_scores(start: ResumePoint, changes: Sequence[str] = ()) -> ResumePoint:
    """Return the resume point without its scores: those of other images or weights are no measure for those to come."""
    metadata = msgspec.structs.replace(start.metadata, best=NO_BEST, best_metric=None, stale_epochs=0)
    return replace(start, checkpoint=replace(start.checkpoint, metadata=metadata), changes=(*start.changes, *changes))


def check_length(start: ResumePoint, total_steps: int) -> ResumePoint:
    """Return the resume point; raises `UserError` if no step is left for it, see `check_end`."""
    check_end(start.path, start.step, total_steps, start.step - total_steps, start.changes)
    return start


def map_place(start: ResumePoint, batch_size: int, steps_per_epoch: int, train_examples: int) -> ResumePoint:
    """Return the resume point with its place in this run, whose epochs may have other steps.

    Raises `UserError` for a place inside an epoch of other images, which this run does not have.
    """
    saved = start.metadata
    old_batch = saved.settings.get("batch_size")
    same_count = saved.data.train_examples in (0, train_examples)
    if same_count and old_batch in (None, batch_size):
        return start
    if saved.examples and not same_count:
        raise UserError(
            f"{start.path}: saved inside epoch {saved.epoch + 1}, after {saved.examples:,} of"
            f" {saved.data.train_examples:,} images; the data set has {train_examples:,} now. Resume from a checkpoint"
            " of a finished epoch or start a new run."
        )
    inside = min(saved.examples // batch_size, steps_per_epoch)
    step = saved.epoch * steps_per_epoch + inside
    mean = sum(saved.losses) / len(saved.losses) if saved.losses else 0.0
    text = f"step {saved.step} of epochs with other steps is step {step} here"
    return replace(start, step=step, losses=(mean,) * inside, changes=(*start.changes, text))


def check_shapes(
    path: Path, section: str, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `UserError` if a section's tensors are not those of the model: other names or other shapes."""
    assert section in SECTIONS
    for name in {**wanted, **saved}:
        was, now = saved.get(name), wanted.get(name)
        if was == now:
            continue
        there = f"{'x'.join(map(str, was)) or 'one value'} there" if was is not None else "not there"
        here = f"{'x'.join(map(str, now)) or 'one value'} here" if now is not None else "not here"
        raise UserError(
            f"{path}: is of another model: {printable(name)} is {there} and {here}. Restore the settings and images"
            " that it was saved with, or start a new run."
        )
