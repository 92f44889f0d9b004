"""How many CPUs the ranks leave to others who keep them busy, and why."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.budget import Budget
from entrypoint.crowd import beyond_idle, seen
from entrypoint.devices import Devices
from entrypoint.errors import Exit, Refused
from entrypoint.question import Question


@dataclass(frozen=True)
class Left:
    """How many CPUs are left to others, the threads of each rank beside them, and what there is to say about it.

    `crowd` is how many others keep busy where that is too many to leave.
    """

    cpus: int
    threads: tuple[int, ...]
    why: str = ""
    crowd: int = 0


def leave_to_others(
    question: Question, devices: Devices, budget: Budget, cpus: tuple[tuple[int, ...], ...], fair: tuple[int, ...]
) -> Left:
    """Return what the ranks leave to others by having fewer threads than `fair`, those that fit on their `cpus`.

    OpenMP's equal parts wait for the thread that has half a CPU, so that one busy neighbour halves a rank of any number
    of threads; where more than half of the CPUs are busy, fewer threads are no better. Raises `Refused` where a person
    leaves a rank none.
    """
    asked = question.settings.values.neighbours
    busy = question.kept_busy if asked == "auto" else asked
    each, fewest = -(-beyond_idle(question, budget, busy) // len(cpus)), min(map(len, cpus))
    fewer = tuple(min(most, len(share) - each) for most, share in zip(fair, cpus, strict=True))
    if fewer == fair:  # as under a quota
        return Left(busy, fair)
    crowded = seen(question.machine)
    if asked == "auto" and devices.device != "cpu":
        return Left(0, fair)
    if asked == "auto" and 2 * each > fewest:
        if question.before:
            return Left(0, fair, crowd=busy)
        told = f"; others keep {crowded} busy, too many to leave: `entrypoint tune` finds what is best"
        return Left(0, fair, told, busy)
    if each >= fewest:
        raise Refused(
            f"{question.settings.source['neighbours']}: leaves no CPU to a rank that has {fewest}; lower it",
            Exit.MACHINE,
        )
    why = (
        f"they keep {crowded} busy, and the other threads would wait for those beside them;"
        " LAUNCH_NEIGHBOURS=0 takes all"
        if question.before is None
        else f"{question.before.neighbours}, as the run did that this one goes on with"
    )
    return Left(busy, fewer, f", less what is left to others: {question.why('neighbours', why)}")
