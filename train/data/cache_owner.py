"""Who owns an entry of the image cache, and whether this user may believe it."""

from __future__ import annotations

import os
import pwd
import re
import stat
from pathlib import Path

# The name of an entry: the key of its content, and the number of a user who could not use the entry of that name.
ENTRY = re.compile(r"[0-9a-f]{32}(\.\d+)?", re.ASCII)
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def owner_name(path: Path) -> str:
    """Return the name of a file's owner, or its number if it has no name here."""
    owner = path.stat().st_uid
    try:
        return pwd.getpwuid(owner).pw_name
    except KeyError:
        return str(owner)


def other_owners(folder: Path) -> tuple[str, ...]:
    """Return the names of other users who own entries in a cache folder, sorted."""
    found = set()
    try:
        for entry in os.scandir(folder):
            if ENTRY.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid != os.getuid():
                found.add(owner_name(Path(entry.path)))
    except OSError:  # no folder yet
        return ()
    return tuple(sorted(found))


def others_can_write(path: Path) -> bool:
    """Return whether a file's mode lets its group or everybody write it."""
    return bool(path.stat().st_mode & OTHERS_WRITE)


def why_not_trusted(entry: Path, is_named: bool) -> str:
    """Return why an entry is not read, empty if it is.

    An entry of this user is read if no other user can write it. One of somebody else is read only in a folder that the
    user named (`is_named`), and only if nobody but its owner can write it.
    """
    folder = entry.lstat()
    if not stat.S_ISDIR(folder.st_mode):
        return "it is a link"
    if folder.st_uid != os.getuid() and not is_named:
        return "TRAIN_CACHE_DIR does not name the folder"
    for name in (".", *sorted(os.listdir(entry))):
        status = folder if name == "." else (entry / name).lstat()
        where = "the folder" if name == "." else name
        if status.st_uid != folder.st_uid:
            return f"{where} belongs to another user"
        if name != "." and not stat.S_ISREG(status.st_mode):
            return f"{where} is not a regular file"
        if status.st_mode & OTHERS_WRITE:
            return f"others can write {where}"
    return ""
