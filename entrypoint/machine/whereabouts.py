"""Says in a few words where a running rank is, for the line that names who is missing from a collective."""

from __future__ import annotations

from msgspec import Struct

from entrypoint.core.collective_error import collective_of, place_of
from entrypoint.core.errors import printable
from entrypoint.machine.procfs import ROOT, read_lines
from entrypoint.machine.stacks import NoStacksError, main_thread_frames, read_python_stacks

# A rank that has lost another one waits for this answer before it ends.
ANSWER_LIMIT_S = 1.0
# Where a rank is at its end.
EXIT_FILES = ("/entrypoint/core/exit_delay.py", "/entrypoint/core/collective_error.py")


class Whereabouts(Struct, frozen=True):
    """Where a process is, as the end of a sentence, its place in the program, its collective, and its stacks.

    The last three are empty where they are unknown.
    """

    text: str
    place: str = ""
    collective: str = ""
    stacks: str = ""

    @property
    def is_exiting(self) -> bool:
        """Return whether the process is about to end."""
        return any(file in self.place for file in EXIT_FILES)


def locate(process: int) -> Whereabouts:
    """Return where the main thread of a process is."""
    try:
        stacks = read_python_stacks(process, ANSWER_LIMIT_S)
    except NoStacksError as error:
        return Whereabouts(f"is {error}")
    frames = main_thread_frames(stacks)
    place, collective = place_of(frames), collective_of(frames)
    inside = f"in {collective} " if collective else ""
    return Whereabouts(f"is {inside}at {printable(place)}", place, collective, stacks)


def program_of(process: int, monitor_name: str) -> int:
    """Return the process of a rank's program: itself, or the child of its monitor; 0 if that has ended."""
    if "".join(read_lines(ROOT / f"proc/{process}/comm")) != monitor_name:
        return process
    children = "".join(read_lines(ROOT / f"proc/{process}/task/{process}/children")).split()
    return int(children[0]) if children else 0
