"""Names the ranks of this node that are missing from a collective in which another rank waited in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from entrypoint.core.console import write_stderr
from entrypoint.launch.failures import Failure
from entrypoint.machine.missing_ranks import UNTIL_LIMIT, MissingRank, find_missing, missing_line, missing_stacks
from entrypoint.plan.model import Plan
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

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


def explain_hang(failures: Sequence[Failure], running: Mapping[int, int], ended: Sequence[int]) -> Hang:
    """Return which ranks are missing from the collective that failed.

    `failures` are those of the ranks that waited, `running` maps the ranks that still run to their processes, and
    `ended` are those that ended without an error. The trainer's ranks write the line themselves.
    """
    waited = next((one for one in failures if one.lost_collective.get("how") == "timeout"), failures[0])
    lost = waited.lost_collective
    timed_out = lost.get("how") == "timeout"  # else another rank closed the connection, and ends as well
    missing = find_missing(running, lost.get("place", ""), MONITOR) if timed_out or not lost else {}
    stacks = missing_stacks(missing)
    if not missing and (timed_out or not running):
        missing = dict.fromkeys(sorted(ended), MissingRank(PROGRAM_ENDED))
    if not missing or not lost:
        return Hang(stacks=stacks)
    return Hang(missing_line(missing, lost, waited.rank, UNTIL_LIMIT if timed_out else "in vain"), stacks)
