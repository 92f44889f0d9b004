"""Names the ranks of this node that are missing from a collective in which another rank waited in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrypoint.core.errors import printable
from entrypoint.launch.failures import Failure
from entrypoint.machine.process_state import state_of
from entrypoint.rank.whereabouts import locate, program_of
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

# Ranks that are looked for; more are not of use to a reader.
EXIT_HANDLER = "/entrypoint/core/exit_delay.py"
ENDED = ("", "Z", "X")
MAX_DESCRIBED = 4


def explain_hang(failures: Sequence[Failure], running: Mapping[int, int], ended: Sequence[int]) -> str:
    """Return one line about the ranks that are missing from a collective, empty if they are not known.

    `failures` are those of the ranks that waited, `running` maps the ranks that still run to their processes, and
    `ended` are those that ended without an error.
    """
    waited = next((one for one in failures if one.lost_collective.get("how") == "timeout"), failures[0])
    lost = waited.lost_collective
    timed_out = lost.get("how") == "timeout"  # else another rank closed the connection, and ends as well
    missing = find_missing(running, lost.get("place", "")) if timed_out else {}
    if not missing and (timed_out or not running):
        missing = dict.fromkeys(sorted(ended), "its program has ended")
    if not missing:
        return ""
    where = f"{printable(lost.get('called', 'a collective'))} at {printable(lost.get('place', 'an unknown place'))}"
    waits = f"rank {waited.rank} waited {'until its time limit' if lost.get('how') == 'timeout' else 'in vain'}"
    return f"{who_is_missing(missing)} missing from {where}, where {waits}: {describe(missing)}"


def find_missing(running: Mapping[int, int], place: str) -> dict[int, str]:
    """Return where the ranks are that are not in the collective at this place of the program.

    A rank in another collective may wait too, so it counts only if no rank is outside of one. A rank that ends
    meanwhile is no cause.
    """
    outside: dict[int, str] = {}
    elsewhere: dict[int, str] = {}
    for rank, process in sorted(running.items()):
        if len(outside) == MAX_DESCRIBED:  # each that does not answer takes a second
            break
        program = program_of(process, MONITOR)
        found = locate(program)
        if state_of(program) in ENDED or EXIT_HANDLER in found.place:
            continue
        where = f"process {program} {found.text}"
        if not found.collective:
            outside[rank] = where
        elif found.place != escaped(place):
            elsewhere[rank] = where
    return outside or elsewhere


def escaped(place: str) -> str:
    """Return a place as Python's faulthandler writes it, in ASCII."""
    return place.encode("ascii", "backslashreplace").decode()


def who_is_missing(missing: Mapping[int, str]) -> str:
    """Return the subject and verb of the line."""
    if len(missing) == 1:
        return f"rank {next(iter(missing))} is"
    return f"{MAX_DESCRIBED} ranks or more are" if len(missing) >= MAX_DESCRIBED else f"{len(missing)} ranks are"


def describe(missing: Mapping[int, str]) -> str:
    """Return where the missing ranks are."""
    if len(missing) == 1:
        return next(iter(missing.values()))
    return "; ".join(f"rank {rank}: {text}" for rank, text in list(missing.items())[:MAX_DESCRIBED])
