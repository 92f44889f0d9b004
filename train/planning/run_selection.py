"""Select the run's folder and the checkpoints that it may resume from; the plan and the run use the same rules.

This module does without torch, and changes nothing on disk.
"""

from __future__ import annotations

import time
from pathlib import Path

from entrypoint.core.errors import UserError, printable
from entrypoint.core.files import exists, is_file, resolve
from entrypoint.plan.model import Plan
from entrypoint.rank.verify import ObservedRank
from train.checkpoint import folder as checkpoints
from train.checkpoint.metadata import (
    CorruptCheckpoint,
    DataFingerprint,
    check_data,
    check_end,
    compare_settings,
    read_json,
    read_metadata,
)
from train.data.dataset_info import DatasetInfo
from train.setting_groups.run import RunSettings
from train.settings import TrainSettings

SETTINGS_FILE = "settings.json"


def may_change_settings(settings: RunSettings) -> bool:
    """Return whether a resumed run may have other settings: of a run that is named, those that the user gives."""
    return settings.resume_allow_changed or is_file(Path(settings.resume) / SETTINGS_FILE)


def resumed_run_dir(settings: RunSettings) -> Path | None:
    """Return the folder of the run to resume, None for a new run."""
    if settings.resume == "off":
        return None
    if settings.resume == "auto":
        named = settings.output_dir / (settings.run_name or "latest")
        return named if settings.run_name or exists(named) else newest_run(settings.output_dir)
    named = resolve(Path(settings.resume))
    return named if is_file(named / SETTINGS_FILE) else named.parent.parent  # of the folder with its checkpoints


def newest_run(output: Path) -> Path | None:
    """Return the folder of the run that started last, None without any: a copy may lack the link to it."""
    runs = sorted(output.glob(f"*/{SETTINGS_FILE}"), key=lambda path: path.stat().st_mtime)
    return runs[-1].parent if runs else None


def previous_run(settings: RunSettings) -> Plan | None:
    """Return the plan of the run being resumed, None without a readable one."""
    folder = resumed_run_dir(settings)
    return read_json(folder / "plan.json", Plan) if folder else None


def new_run_dir(output: Path, settings: TrainSettings) -> Path:
    """Return a folder name of the moment that nobody has yet."""
    model, dataset = (code.rpartition(":")[2] for code in (settings.network.model, settings.data.dataset))
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{dataset}"
    taken = (output / (name if count == 1 else f"{name}-{count}") for count in range(1, 10_000))
    return next(folder for folder in taken if not exists(folder))


def recorded_ranks(folder: Path) -> list[ObservedRank]:
    """Return the ranks of a run by its ranks.json, none without a readable one."""
    return read_json(folder / "ranks.json", list[ObservedRank]) or []


def select_run_dir(settings: TrainSettings) -> tuple[Path, list[Path]]:
    """Return the folder and the checkpoints to resume from by TRAIN_RESUME, newest first."""
    output, resume = settings.run.output_dir, settings.run.resume
    named = output / settings.run.run_name if settings.run.run_name else None
    before = resumed_run_dir(settings.run)
    starts = checkpoints.list_newest_first(before / checkpoints.FOLDER) if before else []
    is_run = before == resolve(Path(resume))
    if before and starts and (resume == "auto" or is_run):
        if is_run and named and resolve(named) != before:
            refuse_other_run(settings.run, named)
            return named, starts
        return resolve(before), starts
    if before and resume != "auto":
        start = Path(resume)
        if not checkpoints.is_checkpoint(start):
            raise UserError(
                f"TRAIN_RESUME={printable(resume)}: no such checkpoint. Set it to auto, off, a run folder or a"
                " checkpoint."
            )
        in_run = resolve(start).parent.name == checkpoints.FOLDER
        if in_run and (named is None or resolve(named) == before):
            refuse_lost_checkpoints(resolve(start), before)
            return before, [start]
        if named:
            refuse_other_run(settings.run, named)
        return named or new_run_dir(output, settings), [start]
    if named and resume != "auto":  # with auto, a run that ended before its first checkpoint begins again
        refuse_other_run(settings.run, named)
    return named or new_run_dir(output, settings), []


def refuse_lost_checkpoints(start: Path, folder: Path) -> None:
    """Raise `UserError` if the run has newer checkpoints than the one to resume from.

    Two histories in one folder cannot be distinguished: a later `auto` would resume from the old one.
    """
    newest = checkpoints.newest(folder / checkpoints.FOLDER)
    if newest and newest.name != start.name and checkpoints.is_checkpoint(newest):
        raise UserError(
            f"TRAIN_RESUME={start}: {folder.name} has a newer checkpoint, {newest.name}. Set TRAIN_RUN_NAME to a new"
            " name, or TRAIN_RESUME=auto."
        )


def refuse_other_run(settings: RunSettings, named: Path) -> None:
    """Raise `UserError` if the folder that TRAIN_RUN_NAME names holds a run."""
    if exists(named / SETTINGS_FILE):
        raise UserError(
            f"TRAIN_RUN_NAME={settings.run_name}: {named} already holds a run. Choose another name or"
            " set TRAIN_RESUME=auto to resume it."
        )


def check_resume(settings: TrainSettings, dataset: DatasetInfo) -> None:
    """Raise `UserError` for a run name or a checkpoint that the run would refuse, as far as the plan knows the data.

    The checkpoint's tensors are not looked at.
    """
    # How many are left to train on is the run's to find out, where some choose or may be unreadable.
    trained = 0 if settings.data.val_split or settings.data.on_unreadable_image == "skip" else dataset.train_images
    data = DataFingerprint(classes=dataset.classes, train_examples=trained)
    corrupt: list[CorruptCheckpoint] = []
    for path in select_run_dir(settings)[1]:
        try:
            metadata, _ = read_metadata(path)
        except CorruptCheckpoint as error:
            corrupt.append(error)
            continue
        changes = compare_settings(path, metadata, settings.to_json(), changed=may_change_settings(settings.run))
        check_data(path, metadata.data, data, changed=settings.run.resume_allow_changed)
        optim, place, end = settings.optim, (metadata.epoch, metadata.examples), (settings.optim.epochs, 0)
        after = (place > end) - (place < end)
        if optim.steps:
            after = metadata.step - optim.steps if metadata.settings.get("batch_size") == optim.batch_size else -1
        check_end(path, metadata.step, optim.steps, after, changes)
        return
    if corrupt:
        raise corrupt[0]
