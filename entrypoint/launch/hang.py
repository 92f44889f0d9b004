"""Names the ranks of this node that are missing from a collective in which another rank waited in vain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from entrypoint.core.errors import printable
from entrypoint.launch.failures import Failure
from entrypoint.rank.whereabouts import locate, program_of
from entrypoint.supervise.monitor import PROCESS_NAME as MONITOR

# Ranks that are looked for; more are not of use to a reader.
MAX_DESCRIBED = 4


def explain_hang(failures: Sequence[Failure], running: Mapping[int, int], ended: Sequence[int]) -> str:
    """Return one line about the ranks that are missing from a collective, empty if they are not known.

    `failures` are those of the ranks that waited, `running` maps the ranks that still run to their processes, and
    `ended` are those that ended without an error.
    """
    waited = next((one for one in failures if one.lost_collective.get("how") == "timeout"), failures[0])
    lost = waited.lost_collective
    missing: dict[int, str] = {}
    if lost.get("how") == "timeout":  # else another rank closed the connection, and ends as well
        for rank, process in sorted(running.items()):
            if len(missing) == MAX_DESCRIBED:  # each that does not answer takes a second
                break
            process = program_of(process, MONITOR)
            found = locate(process)
            if not found.place or found.place != lost.get("place"):
                missing[rank] = f"process {process} {found.text}"
    missing |= dict.fromkeys(sorted(ended), "its program has ended")
    if not missing:
        return ""
    where = f"{printable(lost.get('called', 'a collective'))} at {printable(lost.get('place', 'an unknown place'))}"
    waits = f"rank {waited.rank} waited {'until its time limit' if lost.get('how') == 'timeout' else 'in vain'}"
    return f"{who_is_missing(missing)} missing from {where}, where {waits}: {describe(missing)}"


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
