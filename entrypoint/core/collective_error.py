"""Recognizes the failure of a collective, and the place in a program where it was called."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from types import TracebackType

from msgspec import Struct

# Messages of Gloo and its sockets when a collective fails. Gloo has no exception class of its own.
COLLECTIVE_ERROR = re.compile(
    r"gloo|connection (closed|reset|refused)|timed out waiting|timeout caused pair closure|broken pipe"
    r"|network is (unreachable|down)|no route to host|socket closed",
    re.IGNORECASE,
)
TIMEOUT = re.compile(r"timed out|timeout", re.IGNORECASE)
# torch's own classes, by name: this module imports no torch.
ERROR_CLASSES = ("DistBackendError", "DistNetworkError")
# How Gloo begins a message: with its own source file and line.
GLOO_PLACE = re.compile(r"\[[^\]]*gloo/")
DISTRIBUTED = ("/torch/distributed/", "/torch/nn/parallel/", "/torch/autograd/")
COLLECTIVES_FILE = "/torch/distributed/distributed_c10d.py"
# A function of this name waits for other ranks, and is no torch's.
WAITING_FUNCTION = "wait_in_collective"
# A rank that is in a function of this name ends, such as in `core.exit_delay`.
EXIT_FUNCTION = "delay_exit"
BACKWARD_FILE = "/torch/autograd/graph.py"
# Folders of what the user did not write.
LIBRARIES = ("/site-packages/", "/dist-packages/", f"{os.path.dirname(os.__file__)}/", "<frozen ")  # noqa: PTH120


class Frame(Struct, frozen=True):
    """A function call of a stack."""

    file: str
    line: int
    function: str


def is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from a collective."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ in ERROR_CLASSES or bool(COLLECTIVE_ERROR.search(str(error)))
    )


def collective_of(frames: Sequence[Frame]) -> str:
    """Return the collective that a stack is in, innermost frame first, empty if it shows none.

    DDP exchanges gradients in the backward pass.
    """
    if calls := [frame.function for frame in frames if frame.file.endswith(COLLECTIVES_FILE)]:
        return calls[-1]
    if any(frame.function == WAITING_FUNCTION for frame in frames):
        return "an exchange"
    return "the backward pass" if any(frame.file.endswith(BACKWARD_FILE) for frame in frames) else ""


def place_of(frames: Sequence[Frame]) -> str:
    """Return where a stack is in the user's own program, innermost frame first: `x.py:12 in main`."""
    own = (frame for frame in frames if not any(folder in frame.file for folder in LIBRARIES))
    frame = next(own, frames[0] if frames else None)
    if frame is None:
        return "an unknown place"
    function = "" if frame.function == "<module>" else f" in {frame.function}"
    return f"{frame.file}:{frame.line}{function}"


def frames_of(traceback: TracebackType | None) -> list[Frame]:
    """Return the frames of a traceback, innermost first."""

    def walk(at: TracebackType | None) -> Iterator[Frame]:
        while at:
            code = at.tb_frame.f_code
            yield Frame(code.co_filename, at.tb_lineno, code.co_name)
            at = at.tb_next

    return list(walk(traceback))[::-1]


def lost_collective(error: BaseException) -> dict[str, str]:
    """Return which collective failed, where it was called, and whether that took too long."""
    frames = frames_of(error.__traceback__)
    how = "timeout" if TIMEOUT.search(str(error)) else "failure"
    return {"called": collective_of(frames) or "a collective", "place": place_of(frames), "how": how}


def note_collective_error(error: BaseException) -> None:
    """Note in this rank's error file that a collective ended its program, for the launcher to name the cause."""
    files = [frame.file for frame in frames_of(error.__traceback__)]
    # A download may say `connection refused` too.
    in_torch = type(error).__name__ in ERROR_CLASSES or any(part in file for file in files for part in DISTRIBUTED)
    if not is_collective_error(error) or not (in_torch or GLOO_PLACE.match(str(error))):
        return
    from entrypoint.core.console import error_record_path, write_error_record
    from entrypoint.core.errors import COLLECTIVE_KEY, first_line

    path = error_record_path(os.environ)
    if path and not has_content(path):  # the program wrote it itself, and knows more
        record = {"lost_peer": True, COLLECTIVE_KEY: lost_collective(error)}
        write_error_record(path, first_line(error), record)


def has_content(path: str) -> bool:
    """Return whether a file is there and not empty."""
    try:
        return os.stat(path).st_size > 0  # noqa: PTH116 - pathlib is imported late
    except OSError:
        return False
