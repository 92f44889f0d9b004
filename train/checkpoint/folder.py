"""The checkpoints in a run's `checkpoint` folder: their names, the newest ones, the best one, and which are removed."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

from entrypoint.core.console import log_once
from entrypoint.core.files import atomic_write_text, exists, is_file, is_folder, read_regular, replace_symlink
from train.checkpoint.metadata import CHECKSUM_FILE, METADATA_FILE, STEP_NAME, read_json

TEMPORARY_NAME = re.compile(r"\.(?:(step-\d{9,})(\.replaced)?|best\.\d+)", re.ASCII)
# In the folder of a run.
FOLDER = "checkpoint"
BEST = "best"
REPLACED = ".replaced"
# What file systems without links or without a sync of folders answer: SMB, exFAT, some of FUSE.
CANNOT = {errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP}


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps."""
    return folder / f"step-{step:09d}"


def temporary_path(path: Path) -> Path:
    """Return where a checkpoint is written before it gets its name."""
    return path.with_name(f".{path.name}")


def is_checkpoint(path: Path) -> bool:
    """Return whether a path leads to a folder that looks like a complete checkpoint."""
    return is_folder(path) and exists(path / CHECKSUM_FILE)


def list_newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder by step, newest first; links are the user's."""
    try:
        entries = [entry for entry in os.scandir(folder) if not entry.is_symlink()]
    except OSError:
        return []
    found = ((STEP_NAME.fullmatch(entry.name), entry) for entry in entries)
    steps = [(int(match[1]), entry.name) for match, entry in found if match]
    return [folder / name for _, name in sorted(steps, reverse=True)]


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint of a folder, or None if there is none."""
    return next(iter(list_newest_first(folder)), None)


def prepare(path: Path) -> Path:
    """Return a new empty folder to write a checkpoint into; raises OSError."""
    temp_dir = temporary_path(path)
    remove_tree(temp_dir)
    temp_dir.mkdir(parents=True)
    return temp_dir


def commit(temp_dir: Path, path: Path, keep: tuple[int, int], *, best: bool) -> None:
    """Give a written checkpoint its name, link it if it is the best, and remove old ones; raises OSError."""
    sync_folder(temp_dir)
    replaced = temp_dir.with_name(temp_dir.name + REPLACED)
    if path.exists():
        remove_tree(replaced)
        path.rename(replaced)
    temp_dir.rename(path)
    sync_folder(path.parent)
    remove_tree(replaced)
    prune_old(path, keep, best=best)


def sync_folder(folder: Path) -> None:
    """Write the names of a folder's entries to the disk; raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        log_once("warning: this file system cannot sync folders. A crash of the machine may lose the last checkpoint.")
    finally:
        os.close(descriptor)


def best_first(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder whose score is known, the best first, and of equal ones the newest."""
    complete = filter(is_checkpoint, list_newest_first(folder))
    known = {checkpoint: read_json(checkpoint / METADATA_FILE, dict[str, Any]) or {} for checkpoint in complete}
    scores = {path: score for path, saved in known.items() if isinstance(score := saved.get("score"), int | float)}
    return sorted(scores, key=scores.__getitem__, reverse=True)


def prune_old(path: Path, keep: tuple[int, int], *, best: bool) -> None:
    """Link a new checkpoint if it is the best, then remove all but the new one, the newest and the best ones."""
    if best:
        point_to_best(path)
    newest_kept, best_kept = keep
    kept = {path, *(best_first(path.parent)[:best_kept] if best_kept > 1 else ())}
    complete = [checkpoint for checkpoint in list_newest_first(path.parent) if is_checkpoint(checkpoint)]
    for old in complete[newest_kept:]:
        if old not in kept and old.resolve() != best_checkpoint(path.parent):
            remove_tree(old)


def point_to_best(path: Path) -> None:
    """Make `best` a link to this checkpoint, or a file with its name where there are no links; raises OSError."""
    try:
        replace_symlink(path.with_name(BEST), path.name)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        atomic_write_text(path.with_name(BEST), path.name + "\n")
        log_once("warning: this file system has no links, so checkpoint/best is a file with the name of the best one.")


def best_checkpoint(folder: Path) -> Path:
    """Return the best checkpoint of a folder, or what else is in its place."""
    link = folder / BEST
    if link.is_symlink() or not is_file(link):
        return link.resolve()
    name = read_regular(link).strip()
    return folder.resolve() / name if STEP_NAME.fullmatch(name) else link


def remove_partial(folder: Path) -> None:
    """Remove partial checkpoints of runs that were killed while they saved; raises OSError.

    Requires the run's lock: a partial checkpoint of a live run looks the same. A complete checkpoint that was about to
    be replaced gets its name back.
    """
    for name in os.listdir(folder) if folder.is_dir() else []:
        found = TEMPORARY_NAME.fullmatch(name)
        if not found:
            continue
        if found[2] and not (folder / found[1]).exists():
            (folder / name).rename(folder / found[1])
        else:
            remove_tree(folder / name)


def remove_tree(path: Path) -> None:
    """Remove a file or a folder, if it is there; raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
