"""Questions about paths that a user names: a name that is too long, a loop or a locked folder is no error here.

`pathlib` raises for these until Python 3.13. A folder that this process works in may have been removed.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

# More than any list of hosts or plan has.
MAX_TEXT_BYTES = 64 << 20


# Whether a path leads to something, a folder or a regular file that this process can see.
exists = os.path.exists
is_folder = os.path.isdir
is_file = os.path.isfile


def resolve(path: Path) -> Path:
    """Return a path without links; a relative one stays as it is if the working folder was removed."""
    try:
        return Path(os.path.realpath(path))
    except OSError:
        return path


def working_folder() -> Path | None:
    """Return the working folder, or None if it was removed."""
    try:
        return Path.cwd()
    except OSError:
        return None


def open_regular(path: str | Path, more_flags: int = 0) -> int:
    """Open a regular file to read and return its descriptor; raises OSError.

    A FIFO would block, and a device may never end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | more_flags)
    kind = os.fstat(descriptor).st_mode
    if stat.S_ISREG(kind):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "Not a regular file", str(path))


def read_regular(path: str | Path) -> str:
    """Return the text of a regular file, undecodable bytes replaced; raises OSError, also for a very large file."""
    with os.fdopen(open_regular(path), errors="replace") as file:
        if os.fstat(file.fileno()).st_size > MAX_TEXT_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        return file.read()
