"""Writable user folders, and fallbacks for an unusable home or temporary folder.

A container may run as a user without a name, on a read-only file system, with HOME unset, at `/` or read-only.
matplotlib, Triton and inductor then fail or warn. They write below the home folder and read the user's name.
"""

from __future__ import annotations

import errno
import os
import pwd
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from msgspec import Struct

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.paths import is_folder, working_folder

# Python's own candidates in its order (tempfile.gettempdir), then what Docker leaves writable in a read-only container.
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
SHARED_MEMORY = "/dev/shm"
PRIVATE = "reference-training-{}"


class UserDirs(Struct, frozen=True):
    """The state of HOME, a writable temporary folder (empty: none), and the user."""

    home: Literal["usable", "read-only", "missing"] = "usable"
    temporary: str = "/tmp"
    python_finds_it: bool = True
    uid: int = 0
    named: bool = True


def read_user_dirs(environ: Mapping[str, str]) -> UserDirs:
    """Check the folders that the environment names, as this process's user."""
    home = environ.get("HOME", "")
    own = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    python_finds = next((folder for folder in (*own, *TEMPORARY) if is_writable(folder)), "")
    return UserDirs(
        home="usable" if is_writable(home) else "read-only" if home not in ("", "/") and is_folder(home) else "missing",
        temporary=python_finds or (SHARED_MEMORY if is_writable(SHARED_MEMORY) else ""),
        python_finds_it=bool(python_finds),
        uid=os.getuid(),
        named=bool(environ.get("LOGNAME") or environ.get("USER")) or has_name(os.getuid()),
    )


def is_writable(folder: str) -> bool:
    """Return whether this process may create files in a folder."""
    return bool(folder) and is_folder(folder) and os.access(folder, os.W_OK | os.X_OK)


def why_not_writable(folder: Path) -> str:
    """Return why a folder cannot be created or written to, in the kernel's words; empty if it can."""
    if not folder.is_absolute() and working_folder() is None:
        return "the working folder was removed"
    try:
        place = nearest_existing(folder)
        if not place.is_dir():
            return os.strerror(errno.ENOTDIR)
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            return os.strerror(errno.EROFS)
    except OSError as error:  # a name that is too long, a loop of links, a folder that this user may not enter
        return error.strerror or type(error).__name__
    return "" if os.access(place, os.W_OK | os.X_OK) else os.strerror(errno.EACCES)


def nearest_existing(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists; raises OSError."""
    for place in (folder, *folder.absolute().parents):
        try:
            place.stat()
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():  # mkdir(2) does not follow a link to nothing
                raise
            continue
        return place
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def has_name(uid: int) -> bool:
    """Return whether the user database (/etc/passwd, for example) contains a user."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def fallback_variables(dirs: UserDirs, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fallback variables for unusable folders, each with its reason; the user's variables win."""
    fallbacks: dict[str, tuple[str, str]] = {}
    if not dirs.named:
        fallbacks["USER"] = (str(dirs.uid), f"user {dirs.uid} has no name here, and inductor asks for one")
    if dirs.temporary and not dirs.python_finds_it:
        fallbacks["TMPDIR"] = (dirs.temporary, "no other folder for temporary files can be written to")
    if dirs.temporary and dirs.home != "usable":
        home, folder = environ.get("HOME", ""), private_folder(dirs)
        why = f"HOME={printable(home)} cannot be written to" if home else "HOME is not set"
        caches = {
            "XDG_CACHE_HOME": f"{folder}/.cache",
            "MPLCONFIGDIR": f"{folder}/matplotlib",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        wanted = {"HOME": folder} if dirs.home == "missing" else caches
        fallbacks |= {name: (value, why) for name, value in wanted.items() if name == "HOME" or not environ.get(name)}
    return fallbacks


def user_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return this project's folder among the user's caches, or None without a home (XDG base directories)."""
    home = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(home, "reference-training") if home else None


def private_folder(dirs: UserDirs) -> str:
    """Return the folder that replaces the home folder."""
    return f"{dirs.temporary}/{PRIVATE.format(dirs.uid)}"


def create_private_dir(dirs: UserDirs) -> None:
    """Create the private folder that replaces the home folder; raises `UserError` if another user owns it."""
    folder = Path(private_folder(dirs))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created ({error.strerror}). Set HOME to a folder that you own.", ExitCode.MACHINE
        ) from None
    if found.st_uid != dirs.uid or folder.is_symlink():
        raise UserError(
            f"{folder}: belongs to user {found.st_uid}. Set HOME to a folder that you own.", ExitCode.MACHINE
        )


def apply_fallbacks(environ: Mapping[str, str], *, make: bool) -> dict[str, tuple[str, str]]:
    """Set the fallback variables in this process's environment and return them; create the folder if `make` is set.

    Raises `UserError` if the folder cannot be created.
    """
    dirs = read_user_dirs(environ)
    fallbacks = fallback_variables(dirs, environ)
    if make and any(value.startswith(private_folder(dirs)) for value, _ in fallbacks.values()):
        create_private_dir(dirs)
    os.environ.update({name: value for name, (value, _) in fallbacks.items()})
    return fallbacks


def with_fallbacks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the fallbacks for unusable folders; raises `UserError`."""
    return {**environ, **{name: value for name, (value, _) in apply_fallbacks(environ, make=True).items()}}
