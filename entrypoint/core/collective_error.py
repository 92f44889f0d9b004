"""Recognizes the failure of a collective, and the place in a program where it was called."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from traceback import FrameSummary, StackSummary, walk_tb

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


def is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from a collective."""
    return isinstance(error, RuntimeError) and (
        type(error).__name__ in ERROR_CLASSES or bool(COLLECTIVE_ERROR.search(str(error)))
    )


def collective_of(frames: Sequence[FrameSummary]) -> str:
    """Return the collective that a stack is in, innermost frame first, empty if it shows none.

    DDP exchanges gradients in the backward pass.
    """
    if calls := [frame.name for frame in frames if frame.filename.endswith(COLLECTIVES_FILE)]:
        return calls[-1]
    if any(frame.name == WAITING_FUNCTION for frame in frames):
        return "an exchange"
    return "the backward pass" if any(frame.filename.endswith(BACKWARD_FILE) for frame in frames) else ""


def place_of(frames: Sequence[FrameSummary]) -> str:
    """Return where a stack is in the user's own program, innermost frame first: `x.py:12 in main`."""
    own = (frame for frame in frames if not any(folder in frame.filename for folder in LIBRARIES))
    frame = next(own, frames[0] if frames else None)
    if frame is None:
        return "an unknown place"
    function = "" if frame.name == "<module>" else f" in {frame.name}"
    return f"{frame.filename}:{frame.lineno}{function}"


def frames_of(error: BaseException) -> list[FrameSummary]:
    """Return the frames of an error's traceback, innermost first."""
    return StackSummary.extract(walk_tb(error.__traceback__), lookup_lines=False)[::-1]


def lost_collective(error: BaseException) -> dict[str, str]:
    """Return which collective failed, where it was called, and whether that took too long."""
    frames = frames_of(error)
    how = "timeout" if TIMEOUT.search(str(error)) else "failure"
    return {"called": collective_of(frames) or "a collective", "place": place_of(frames), "how": how}


def note_collective_error(error: BaseException) -> None:
    """Note in this rank's error file that a collective ended its program, for the launcher to name the cause."""
    files = [frame.filename for frame in frames_of(error)]
    # A download may say `connection refused` too.
    in_torch = type(error).__name__ in ERROR_CLASSES or any(part in file for file in files for part in DISTRIBUTED)
    if not is_collective_error(error) or not (in_torch or GLOO_PLACE.match(str(error))):
        return
    from entrypoint.core.console import error_record_path, write_error_record
    from entrypoint.core.errors import COLLECTIVE_KEY, first_line
    from entrypoint.core.files import exists

    path = error_record_path(os.environ)
    if path and not (exists(path) and os.stat(path).st_size):  # noqa: PTH116  # the program wrote it, and knows more
        record = {"lost_peer": True, COLLECTIVE_KEY: lost_collective(error)}
        write_error_record(path, first_line(error), record)
