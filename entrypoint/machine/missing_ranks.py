"""Finds the ranks of this node that are missing from a collective, and says where they are."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from entrypoint.core.errors import printable
from entrypoint.machine.process_state import state_of
from entrypoint.machine.stacks import stacks_text
from entrypoint.machine.whereabouts import locate, program_of

ENDED = ("", "Z", "X")
# Ranks that are looked for; more are not of use to a reader.
MAX_DESCRIBED = 4
UNTIL_LIMIT = "until its time limit"


class MissingRank(Struct, frozen=True):
    """Where a rank is that is missing from a collective, and its stacks where it gave them."""

    where: str
    stacks: str = ""


def find_missing(running: Mapping[int, int], place: str, monitor_name: str) -> dict[int, MissingRank]:
    """Return where the ranks are that are not in the collective at this place of the program.

    `running` maps ranks to their processes, which may be monitors of that name.
    A rank in another collective may wait too, so it counts only if no rank is outside of one. A rank that ends
    meanwhile is no cause.
    """
    outside: dict[int, MissingRank] = {}
    elsewhere: dict[int, MissingRank] = {}
    for rank, process in sorted(running.items()):
        if len(outside) == MAX_DESCRIBED:  # each that does not answer takes a second
            break
        program = program_of(process, monitor_name)
        found = locate(program)
        if state_of(program) in ENDED or found.is_exiting:
            continue
        one = MissingRank(f"process {program} {found.text}", found.stacks)
        if not found.collective:
            outside[rank] = one
        elif place and found.place != escaped(place):
            elsewhere[rank] = one
    return outside or elsewhere


def escaped(place: str) -> str:
    """Return a place as Python's faulthandler writes it, in ASCII."""
    return place.encode("ascii", "backslashreplace").decode()


def missing_line(missing: Mapping[int, MissingRank], lost: Mapping[str, str], rank: int, waited: str) -> str:
    """Return one line about the missing ranks; `lost` says which collective failed for `rank`."""
    where = f"{printable(lost.get('called', 'a collective'))} at {printable(lost.get('place', 'an unknown place'))}"
    return f"{who_is_missing(missing)} missing from {where}, where rank {rank} waited {waited}: {describe(missing)}"


def missing_stacks(missing: Mapping[int, MissingRank]) -> tuple[str, ...]:
    """Return the stacks of the missing ranks that gave them."""
    return tuple(stacks_text(f"rank {rank}  {one.where}", one.stacks) for rank, one in missing.items() if one.stacks)


def who_is_missing(missing: Mapping[int, MissingRank]) -> str:
    """Return the subject and verb of the line."""
    if len(missing) == 1:
        return f"rank {next(iter(missing))} is"
    return f"{MAX_DESCRIBED} ranks or more are" if len(missing) >= MAX_DESCRIBED else f"{len(missing)} ranks are"


def describe(missing: Mapping[int, MissingRank]) -> str:
    """Return where the missing ranks are."""
    if len(missing) == 1:
        return next(iter(missing.values())).where
    return "; ".join(f"rank {rank}: {one.where}" for rank, one in list(missing.items())[:MAX_DESCRIBED])
