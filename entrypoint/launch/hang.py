"""Names the ranks of this node that are missing from a collective in which another rank waited in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from entrypoint.core.console import write_stderr
from entrypoint.core.errors import printable
from entrypoint.launch.failures import Failure
from entrypoint.machine.process_state import state_of
from entrypoint.machine.stacks import stacks_text
from entrypoint.machine.whereabouts import locate, program_of
from entrypoint.plan.model import Plan
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

ENDED = ("", "Z", "X")
# Ranks that are looked for; more are not of use to a reader.
MAX_DESCRIBED = 4
PROGRAM_ENDED = "its program has ended"


class Hang(Struct, frozen=True):
    """One line about the ranks that are missing from a collective, and their stacks; empty if they are not known."""

    line: str = ""
    stacks: tuple[str, ...] = ()

    def print_stacks(self, plan: Plan) -> None:
        """Print the stacks of the missing ranks, unless they have monitors, which do that."""
        if plan.nodes.nnodes == 1 or plan.uses_elastic_rendezvous:
            for text in self.stacks:
                write_stderr(text)


class MissingRank(Struct, frozen=True):
    """Where a rank is that is missing from a collective, and its stacks where it gave them."""

    where: str
    stacks: str = ""


def explain_hang(failures: Sequence[Failure], running: Mapping[int, int], ended: Sequence[int]) -> Hang:
    """Return which ranks are missing from the collective that failed.

    `failures` are those of the ranks that waited, `running` maps the ranks that still run to their processes, and
    `ended` are those that ended without an error. The trainer's ranks write the line themselves.
    """
    waited = next((one for one in failures if one.lost_collective.get("how") == "timeout"), failures[0])
    lost = waited.lost_collective
    timed_out = lost.get("how") == "timeout"  # else another rank closed the connection, and ends as well
    missing = find_missing(running, lost.get("place", "")) if timed_out or not lost else {}
    stacks = tuple(stacks_text(f"rank {rank}  {one.where}", one.stacks) for rank, one in missing.items() if one.stacks)
    if not missing and (timed_out or not running):
        missing = dict.fromkeys(sorted(ended), MissingRank(PROGRAM_ENDED))
    if not missing or not lost:
        return Hang(stacks=stacks)
    where = f"{printable(lost.get('called', 'a collective'))} at {printable(lost.get('place', 'an unknown place'))}"
    waits = f"rank {waited.rank} waited {'until its time limit' if timed_out else 'in vain'}"
    return Hang(f"{who_is_missing(missing)} missing from {where}, where {waits}: {describe(missing)}", stacks)


def find_missing(running: Mapping[int, int], place: str) -> dict[int, MissingRank]:
    """Return where the ranks are that are not in the collective at this place of the program.

    A rank in another collective may wait too, so it counts only if no rank is outside of one. A rank that ends
    meanwhile is no cause.
    """
    outside: dict[int, MissingRank] = {}
    elsewhere: dict[int, MissingRank] = {}
    for rank, process in sorted(running.items()):
        if len(outside) == MAX_DESCRIBED:  # each that does not answer takes a second
            break
        program = program_of(process, MONITOR)
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
