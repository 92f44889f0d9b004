"""How many CPUs the ranks leave to others who keep them busy, and why."""

from __future__ import annotations

from dataclasses import dataclass

from entrypoint.budget import Budget, whole_cores
from entrypoint.devices import Devices
from entrypoint.errors import Exit, Refused
from entrypoint.question import Question

# A CPU counts as kept busy from 0.8 of its time on: below, its thread has enough of it. Of 120 plans each on two CPUs,
# beside nobody at most 0.16 was seen, beside one busy process 1.00 to 1.12, beside two 2.00 in all but two plans.
SURELY = 0.2


@dataclass(frozen=True)
class Left:
    """How many CPUs are left to others, the threads of each rank beside them, and what there is to say about it.

    `crowded` names what others keep busy where that is too many to leave.
    """

    cpus: int
    threads: tuple[int, ...]
    why: str = ""
    crowded: str = ""


def leave_to_others(
    question: Question, devices: Devices, budget: Budget, cpus: tuple[tuple[int, ...], ...], fair: tuple[int, ...]
) -> Left:
    """Return what the ranks leave to others by having fewer threads than `fair`, those that fit on their `cpus`.

    OpenMP's equal parts wait for the thread that has half a CPU, so that one busy neighbour halves a rank of any number
    of threads; where more than half of the CPUs are busy, fewer threads are no better. Raises `Refused` where a person
    leaves a rank none.
    """
    asked = question.settings.values.neighbours
    busy = kept_busy(question) if asked == "auto" else asked
    idle = len(whole_cores(question.machine.cpus, siblings=False)) - len(budget.cores)  # cores that no rank is on
    each, fewest = max(0, -(-(busy - idle) // len(cpus))), min(map(len, cpus))
    fewer = tuple(min(most, len(share) - each) for most, share in zip(fair, cpus, strict=True))
    if fewer == fair:  # as under a quota
        return Left(busy, fair)
    seen = f"{question.machine.kept_busy:.1f} of {len(question.machine.cpus)} CPUs"
    if asked == "auto" and devices.device != "cpu":
        return Left(0, fair)
    if asked == "auto" and 2 * each > fewest:
        told = f"; others keep {seen} busy, too many to leave: `entrypoint tune` finds what is best"
        return Left(0, fair, told, seen) if question.neighbours_before is None else Left(0, fair)
    if each >= fewest:
        raise Refused(
            f"{question.settings.source['neighbours']}: leaves no CPU to a rank that has {fewest}; lower it",
            Exit.MACHINE,
        )
    why = (
        f"they keep {seen} busy, and the other threads would wait for those beside them; LAUNCH_NEIGHBOURS=0 takes all"
        if question.neighbours_before is None
        else f"{question.neighbours_before}, as the run did that this one goes on with"
    )
    return Left(busy, fewer, f", less what is left to others: {question.why('neighbours', why)}")


def kept_busy(question: Question) -> int:
    """Return how many CPUs others keep busy; a run that goes on takes what it began with, to end the same.

    0 on nodes that a scheduler grants, and where others start ranks here or elsewhere: they begin together, and would
    take each other for neighbours.
    """
    job = question.job
    if job.launcher or job.nodes or job.granted_cpus is not None or question.starter or question.nodes.count > 1:
        return 0
    before = question.neighbours_before
    return int(question.machine.kept_busy + SURELY) if before is None else before
