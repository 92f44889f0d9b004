"""Writable user folders, and fallbacks for an unusable home or temporary folder.

A container may run as a user without a name, on a read-only file system, with HOME unset, at `/` or read-only.
matplotlib, Triton and inductor then fail or warn. They write below the home folder and read the user's name.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import exists, is_folder, working_folder

# Python's own candidates in its order (tempfile.gettempdir), then what Docker leaves writable in a read-only container.
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
SHARED_MEMORY = "/dev/shm"
# Where inductor and Triton keep what they compile. Both run what they find there. Inductor's own default is a name in
# the temporary folder that anybody can take (torch/_inductor/runtime/cache_dir_utils.py).
COMPILE_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def temporary_folder(environ: Mapping[str, str]) -> str:
    """Return a folder for temporary files, empty if this user may write to none."""
    named = [environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    return next((folder for folder in (*named, *TEMPORARY, SHARED_MEMORY) if is_writable(folder)), "")


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


def user_name(uid: int) -> str:
    """Return a user's name, empty for one whom the user database (/etc/passwd, for example) does not contain."""
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return ""


def fallback_variables(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the fallback variables for unusable folders, each with its reason; the user's variables win."""
    fallbacks: dict[str, tuple[str, str]] = {}
    uid, home, temporary = os.getuid(), environ.get("HOME", ""), temporary_folder(environ)
    if not (environ.get("LOGNAME") or environ.get("USER") or user_name(uid)):
        fallbacks["USER"] = (str(uid), f"user {uid} has no name here, and inductor asks for one")
    if temporary == SHARED_MEMORY:
        fallbacks["TMPDIR"] = (temporary, "no other folder for temporary files can be written to")
    folder = private_folder(temporary)
    why = f"HOME={printable(home)} cannot be written to" if home else "HOME is not set"
    caches = environ.get("XDG_CACHE_HOME") or f"{home}/.cache"
    if temporary and not is_writable(home):
        if home in ("", "/") or not is_folder(home):
            fallbacks["HOME"] = (folder, why)
            caches = environ.get("XDG_CACHE_HOME") or temporary  # else they are below the new home
        elif not environ.get("MPLCONFIGDIR"):
            fallbacks["MPLCONFIGDIR"] = (f"{folder}/matplotlib", why)
    if temporary and (problem := why_not_writable(Path(caches))):
        fallbacks["XDG_CACHE_HOME"] = (f"{folder}/.cache", f"{printable(caches)} cannot be written to ({problem})")
    return fallbacks


def user_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return this project's folder among the user's caches, or None without a home (XDG base directories)."""
    home = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(home, "reference-training") if home else None


def private_folder(temporary: str) -> str:
    """Return the folder that replaces the home folder."""
    return f"{temporary}/reference-training-{os.getuid()}"


def create_private_dir(folder: Path) -> None:
    """Create the private folder that replaces the home folder; raises `UserError` if another user owns it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be created ({error.strerror}). Set HOME to a folder that you own.", ExitCode.MACHINE
        ) from None
    if found.st_uid != os.getuid() or folder.is_symlink():
        raise UserError(
            f"{folder}: belongs to user {found.st_uid}. Set HOME to a folder that you own.", ExitCode.MACHINE
        )


def apply_fallbacks(environ: Mapping[str, str], *, make: bool) -> dict[str, tuple[str, str]]:
    """Set the fallback variables in this process's environment and return them; create the folders if `make` is set.

    Raises `UserError` if a folder cannot be created, or is another user's.
    """
    fallbacks, private = fallback_variables(environ), private_folder(temporary_folder(environ))
    if make and any(value.startswith(private) for value, _ in fallbacks.values()):
        create_private_dir(Path(private))
    fallbacks |= compile_caches({**environ, **{name: value for name, (value, _) in fallbacks.items()}}, make=make)
    os.environ.update({name: value for name, (value, _) in fallbacks.items()})
    return fallbacks


def compile_caches(environ: Mapping[str, str], *, make: bool) -> dict[str, tuple[str, str]]:
    """Return the variables of compile caches below the user's own cache folder; the user's own variables win.

    Raises `UserError` for a folder that another user owns or can write.
    """
    parent = user_cache_dir(environ)
    wanted = {name: str(parent / folder) for name, folder in COMPILE_CACHES.items()} if parent else {}
    chosen = {name: environ.get(name) or wanted.get(name, "") for name in COMPILE_CACHES}
    for name, folder in chosen.items():
        if make and folder and not environ.get(name):
            with suppress(OSError):  # torch says what it cannot write
                Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        if exists(folder) and (problem := why_not_trusted(os.stat(folder))):  # noqa: PTH116
            raise UserError(
                f"{name}={printable(folder)}: {problem}, and torch runs what it finds there. Name a folder of your own."
            )
    return {name: (folder, "") for name, folder in chosen.items() if folder and not environ.get(name)}


def why_not_trusted(status: os.stat_result) -> str:
    """Return who else could have written a file or put files into a folder, empty if only this user and root could."""
    if status.st_uid not in (os.getuid(), 0):
        return f"it belongs to user {user_name(status.st_uid) or status.st_uid}"
    return "other users can write it" if status.st_mode & OTHERS_WRITE else ""


def with_fallbacks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment with the fallbacks for unusable folders; raises `UserError`."""
    return {**environ, **{name: value for name, (value, _) in apply_fallbacks(environ, make=True).items()}}
