"""The user's folder for decoded images and indexes of shards."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from entrypoint.core.errors import UserError
from entrypoint.core.user_dirs import OTHERS_WRITE, user_cache_dir


def cache_folder(configured: Path | None) -> Path:
    """Return this user's folder for decoded images: in the configured folder, else in the user's cache.

    The entrypoint has given a user without a home another one. Raises `UserError` for a folder that cannot be written,
    or that another user owns or can write.
    """
    parent = configured or user_cache_dir(os.environ)
    if parent is None:
        raise UserError("TRAIN_CACHE_DIR: HOME is not set. Name a folder that can be written.")
    folder = parent / f"images-{os.getuid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            status = folder.lstat()
    except OSError:
        raise UserError(
            f"TRAIN_CACHE_DIR={configured or 'unset'}: {parent} cannot be written; name a folder that can"
        ) from None
    if status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE or folder.is_symlink():
        raise UserError(
            f"TRAIN_CACHE_DIR={parent}: another user owns {folder.name} or can write it. Remove it or name another"
            " folder."
        )
    return folder
