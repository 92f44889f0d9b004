"""The key of a job, by which its monitors recognize each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from entrypoint.core.console import log
from entrypoint.core.errors import ExitCode, UserError, printable
from entrypoint.core.files import atomic_path, open_regular
from entrypoint.core.user_dirs import user_cache_dir
from entrypoint.job.run_identity import PROGRAM
from entrypoint.machine.container import is_on_network
from entrypoint.machine.procfs import ROOT

# Holds the key where a batch script or the entrypoint draws one for all ranks.
JOB_KEY_VAR = "ENTRYPOINT_JOB_KEY"
SECRET_FILE_VAR = "LAUNCH_SECRET_FILE"
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 4096
# Key files of jobs that were killed are removed after this time.
OLD_KEY_S = 30 * 86400


class KeySource(Struct, frozen=True):
    """Where a job's key is: in the `variable`, in the user's `file`, or in a file that rank 0 writes (`drawn`)."""

    kind: str = "none"
    path: str = ""


def find_key_source(environ: Mapping[str, str], secret_file: str, identity: str) -> KeySource:
    """Return where the key of a job over several nodes is.

    Rank 0 can hand a key over where the home folder is on a network file system. Where no launcher's id names the run,
    the address at which its ranks meet is a part of the file's name.
    """
    if secret_file:
        return KeySource("file", secret_file)
    if environ.get(JOB_KEY_VAR):
        return KeySource("variable")
    cache = user_cache_dir(environ)
    by_hand, master = identity.startswith(PROGRAM), environ.get("MASTER_ADDR", "")
    is_known = bool(master) if by_hand else identity not in ("", "none")  # torchrun's default is "none"
    if cache and is_known and is_on_network(ROOT, cache):
        import hashlib

        text = "\0".join((identity, master, environ.get("MASTER_PORT", ""))) if by_hand else identity
        name = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]
        return KeySource("drawn", str(cache / "keys" / name))
    return KeySource()


def key_reader(source: KeySource, environ: Mapping[str, str], *, draws: bool) -> Callable[[], bytes]:
    """Return a function that returns the key, empty while there is none; it is read again for each connection.

    With `draws` this process is rank 0, and writes the key where it is to be drawn. Raises `UserError` if the user's
    file cannot be a key.
    """
    if source.kind == "variable":
        key = check_key(environ[JOB_KEY_VAR].encode("utf-8", "surrogateescape"), JOB_KEY_VAR)
        return lambda: key
    if source.kind == "file":
        key = read_secret_file(source.path)
        return lambda: key
    if source.kind == "none":
        return bytes
    path = Path(source.path)
    if draws:
        key = write_key(path)
        if key and read_drawn_key(path) == key:
            return lambda: key
        log(f"warning: {path}: the job's key cannot be kept there. The job has none. Set {SECRET_FILE_VAR}.")
        return bytes
    return lambda: read_drawn_key(path)


def check_key(key: bytes, name: str) -> bytes:
    """Return a key; raises `UserError` if it is too short."""
    if len(key.strip()) < MIN_KEY_BYTES:
        raise UserError(f"{name}: has less than {MIN_KEY_BYTES} bytes. Make one: head -c 32 /dev/urandom | base64")
    return key.strip()


def read_secret_file(name: str) -> bytes:
    """Return the key in the user's file; raises `UserError` if it is none, or others may read or write it.

    A file of root's may be read by all, as a secret that Kubernetes mounts.
    """
    setting = f"{SECRET_FILE_VAR}={printable(name)}"
    try:
        with os.fdopen(open_regular(name), "rb") as file:
            status, key = os.fstat(file.fileno()), file.read(MAX_KEY_BYTES)
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or "no file name"
        raise UserError(f"{setting}: cannot be read ({cause}). Name a file that all nodes read.") from None
    if status.st_uid not in (0, os.getuid()):
        raise UserError(f"{setting}: belongs to another user. Name a file of your own.", ExitCode.MACHINE)
    forbidden = 0o022 if status.st_uid == 0 else 0o077
    if status.st_mode & forbidden:
        raise UserError(f"{setting}: other users may read or write it. Run: chmod 600 {printable(name)}")
    return check_key(key, setting)


def write_key(path: Path) -> bytes:
    """Draw a key, and write it where only this user reads it; return it, empty if it cannot be written."""
    import secrets

    key = secrets.token_hex(32).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_path(path) as temporary, os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
            file.write(key)
    except OSError:
        return b""
    with suppress(OSError):
        for other in path.parent.iterdir():
            if time.time() - other.stat().st_mtime > OLD_KEY_S:
                other.unlink()
    return key


def read_drawn_key(path: Path) -> bytes:
    """Return the key that rank 0 wrote; empty if there is none yet, or if it may be another user's."""
    with suppress(OSError), os.fdopen(open_regular(path, os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return file.read(MAX_KEY_BYTES)
    return b""
