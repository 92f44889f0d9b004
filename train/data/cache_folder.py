"""The user's folder for decoded images and indexes of shards."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from entrypoint.core.errors import UserError
from entrypoint.core.user_dirs import OTHERS_WRITE, private_folder, user_cache_dir


def cache_folder(configured: Path | None) -> Path:
    """Return this user's folder for decoded images: in the configured folder, the user's cache, or a private one.

    Raises `UserError` if none can be written, or if another user owns it or can write it.
    """
    if configured is not None:
        candidates = [configured]
    else:
        own_cache = user_cache_dir(os.environ)
        candidates = [own_cache] if own_cache else []
        with suppress(OSError):  # no temporary folder can be written to
            candidates.append(Path(private_folder(tempfile.gettempdir())))
    for parent in candidates:
        folder = parent / f"images-{os.getuid()}"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
            status = folder.lstat()
            is_private = configured is not None or parent.stat().st_uid == os.getuid()
        except OSError:
            continue
        if not is_private:  # its owner could put another folder in the place of this one
            continue
        if status.st_uid != os.getuid() or status.st_mode & OTHERS_WRITE or folder.is_symlink():
            raise UserError(
                f"TRAIN_CACHE_DIR={parent}: another user owns {folder.name} or can write it. Remove it or name another"
                " folder."
            )
        return folder
    tried = candidates[0] if candidates else "no folder"
    raise UserError(f"TRAIN_CACHE_DIR={configured or 'unset'}: {tried} cannot be written; name a folder that can")
