"""Finds the ranks of this node that are missing from a collective, and says where they are."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from entrypoint.core.collective_error import EXIT_FUNCTION, collective_of, place_of
from entrypoint.core.errors import printable
from entrypoint.hang.stacks import NoStacksError, main_thread_frames, read_python_stacks
from entrypoint.machine.procfs import ROOT, read_lines, state_of

# A rank that has lost another one waits for this answer before it ends.
ANSWER_LIMIT_S = 1.0
ENDED = ("", "Z", "X")
# Ranks that are looked for; more are not of use to a reader.
MAX_DESCRIBED = 4


class Whereabouts(Struct, frozen=True):
    """Where a process is, as the end of a sentence, its place in the program, its collective, and its stacks.

    The last three are empty where they are unknown. With `is_exiting` the process is about to end.
    """

    text: str
    place: str = ""
    collective: str = ""
    stacks: str = ""
    is_exiting: bool = False


def locate(process: int) -> Whereabouts:
    """Return where the main thread of a process is."""
    try:
        stacks = read_python_stacks(process, ANSWER_LIMIT_S)
    except NoStacksError as error:
        return Whereabouts(f"is {error}")
    frames = main_thread_frames(stacks)
    place, collective = place_of(frames), collective_of(frames)
    inside = f"in {collective} " if collective else ""
    return Whereabouts(
        text=f"is {inside}at {printable(place)}",
        place=place,
        collective=collective,
        stacks=stacks,
        is_exiting=any(frame.name == EXIT_FUNCTION for frame in frames),
    )


def program_of(process: int, monitor_name: str) -> int:
    """Return the process of a rank's program: itself, or the child of its monitor; 0 if that has ended."""
    if "".join(read_lines(ROOT / f"proc/{process}/comm")) != monitor_name:
        return process
    children = "".join(read_lines(ROOT / f"proc/{process}/task/{process}/children")).split()
    return int(children[0]) if children else 0


def find_missing(running: Mapping[int, int], place: str, monitor_name: str) -> dict[int, Whereabouts]:
    """Return where the ranks are that are not in the collective at this place of the program.

    `running` maps ranks to their processes, which may be monitors of that name.
    A rank in another collective may wait too, so it counts only if no rank is outside of one. A rank that ends
    meanwhile is no cause.
    """
    outside: dict[int, Whereabouts] = {}
    elsewhere: dict[int, Whereabouts] = {}
    # faulthandler writes places in ASCII
    waited_at = place.encode("ascii", "backslashreplace").decode()
    for rank, process in sorted(running.items()):
        if len(outside) == MAX_DESCRIBED:  # each that does not answer takes a second
            break
        program = program_of(process, monitor_name)
        located = locate(program)
        if state_of(program) in ENDED or located.is_exiting:
            continue
        missing = replace(located, text=f"process {program} {located.text}")
        if not located.collective:
            outside[rank] = missing
        elif place and located.place != waited_at:
            elsewhere[rank] = missing
    return outside or elsewhere


def missing_line(missing: Mapping[int, Whereabouts], lost: Mapping[str, str], rank: int, waited: str) -> str:
    """Return one line about the missing ranks; `lost` says which collective failed for `rank`."""
    place = f" at {printable(lost['place'])}" if lost.get("place") else ""
    collective = f"{printable(lost.get('called', 'a collective'))}{place}, where rank {rank} waited {waited}"
    if len(missing) == 1:
        ((only, absent),) = missing.items()
        return f"rank {only} is missing from {collective}: {absent.text}"
    count = f"{MAX_DESCRIBED} ranks or more" if len(missing) >= MAX_DESCRIBED else f"{len(missing)} ranks"
    places = "; ".join(f"rank {other}: {absent.text}" for other, absent in list(missing.items())[:MAX_DESCRIBED])
    return f"{count} are missing from {collective}: {places}"
