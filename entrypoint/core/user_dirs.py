"""Where this process may write: what stands in for a home or a temporary folder that it cannot use.

A container may run as a user without a name, with HOME unset, at `/` or read-only, on a read-only file system.
matplotlib, Triton and inductor then fail or warn, since they write below the home folder and ask for the user's name.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from entrypoint.core.errors import ExitCode, UserError, printable

# Python's own candidates in its order (tempfile.gettempdir), then what Docker leaves writable in a read-only container.
TEMPORARY = ("/tmp", "/var/tmp", "/usr/tmp")
SHARED_MEMORY = "/dev/shm"
PRIVATE = "reference-training-{}"


@dataclass(frozen=True)
class UserDirs:
    """What was found: the state of HOME, the temporary folder that can be written to (empty: none), the user."""

    home: Literal["usable", "read-only", "missing"] = "usable"
    temporary: str = "/tmp"
    python_finds_it: bool = True
    uid: int = 0
    named: bool = True


def read_user_dirs(environ: Mapping[str, str]) -> UserDirs:
    """Look at what the environment names, as this process's user."""
    home = environ.get("HOME", "")
    own = [environ[name] for name in ("TMPDIR", "TEMP", "TMP") if environ.get(name)]
    python_finds = next((folder for folder in (*own, *TEMPORARY) if is_writable(folder)), "")
    return UserDirs(
        "usable" if is_writable(home) else "read-only" if home not in ("", "/") and Path(home).is_dir() else "missing",
        python_finds or (SHARED_MEMORY if is_writable(SHARED_MEMORY) else ""),
        bool(python_finds),
        os.getuid(),
        bool(environ.get("LOGNAME") or environ.get("USER")) or has_name(os.getuid()),
    )


def is_writable(folder: str) -> bool:
    """Tell whether this process may make files in a folder."""
    return bool(folder) and Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK)


def has_name(uid: int) -> bool:
    """Tell whether a user is listed, as in /etc/passwd."""
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True


def fallback_variables(places: UserDirs, environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variables that stand in for what cannot be used, each with its reason; a person's own are left."""
    instead: dict[str, tuple[str, str]] = {}
    if not places.named:
        instead["USER"] = (str(places.uid), f"user {places.uid} has no name here, and inductor asks for one")
    if places.temporary and not places.python_finds_it:
        instead["TMPDIR"] = (places.temporary, "no other folder for temporary files can be written to")
    if places.temporary and places.home != "usable":
        home, folder = environ.get("HOME", ""), private_folder(places)
        why = f"HOME={printable(home)} cannot be written to" if home else "HOME is not set"
        caches = {
            "XDG_CACHE_HOME": f"{folder}/.cache",
            "MPLCONFIGDIR": f"{folder}/matplotlib",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        wanted = {"HOME": folder} if places.home == "missing" else caches
        instead |= {name: (value, why) for name, value in wanted.items() if name == "HOME" or not environ.get(name)}
    return instead


def user_cache_dir(environ: Mapping[str, str]) -> Path | None:
    """Return this project's folder among the user's caches, None where there is no home (XDG base directories)."""
    home = environ.get("XDG_CACHE_HOME") or (f"{environ['HOME']}/.cache" if environ.get("HOME") else "")
    return Path(home, "reference-training") if home else None


def private_folder(places: UserDirs) -> str:
    """Return the folder that stands in for a home."""
    return f"{places.temporary}/{PRIVATE.format(places.uid)}"


def create_private_dir(places: UserDirs) -> None:
    """Make the folder that stands in for a home, for this user's eyes; raises `UserError` where another one has it."""
    folder = Path(private_folder(places))
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(
            f"{folder}: cannot be made ({error.strerror}); set HOME to a folder of yours", ExitCode.MACHINE
        ) from None
    if found.st_uid != places.uid or folder.is_symlink():
        raise UserError(f"{folder}: belongs to user {found.st_uid}; set HOME to a folder of yours", ExitCode.MACHINE)


def apply_fallbacks(environ: Mapping[str, str], *, make: bool) -> dict[str, tuple[str, str]]:
    """Return the substitutes for this process, set in its own environment too, the folder made where `make` says so.

    Raises `UserError` where the folder cannot be made.
    """
    places = read_user_dirs(environ)
    instead = fallback_variables(places, environ)
    if make and any(value.startswith(private_folder(places)) for value, _ in instead.values()):
        create_private_dir(places)
    os.environ.update({name: value for name, (value, _) in instead.items()})
    return instead
