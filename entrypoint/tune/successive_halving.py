"""Which of several noisy candidates is the fastest: measured in turns, the slow half dropped, until one is ahead."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# A lead counts where so few series of turns would show it by chance.
SIGNIFICANCE = 0.05
# A result takes at least so many turns, and gives up on distinguishing candidates after the most.
MIN_ROUNDS, MAX_ROUNDS = 5, 15
# Candidates as near as this to the last one that is kept are kept too after the first turn, which says little.
FIRST_ROUND_SLACK = 0.05
# Candidates whose medians differ by less than this are as good as each other, and not measured on to tell them apart.
EQUIVALENCE = 0.02
# Below so many candidates none is dropped but by a lead.
MIN_SURVIVORS = 3


@dataclass(frozen=True)
class ComparisonResult(Generic[T]):
    """The candidate with the best median rate, those that it could not be distinguished from, and all rates seen."""

    best: T
    ties: tuple[T, ...]
    rates: dict[T, list[float]]

    def median(self, one: T) -> float:
        """Return a candidate's median rate."""
        return statistics.median(self.rates[one])


def successive_halving(
    candidates: Sequence[T],
    measure: Callable[[T], float | None],
    always: Sequence[T] = (),
    in_time: Callable[[], bool] = lambda: True,
) -> ComparisonResult[T] | None:
    """Measure candidates in turns and return the result; `measure` gives a rate, or None for one that cannot run.

    Successive halving (Jamieson and Talwalkar, 2016, arXiv:1502.07943), by turns of all that are left, so that what
    else the machine does meets each alike. Those of `always` are measured to the end. None where none can run.
    """
    left, rates = list(candidates), {one: list[float]() for one in candidates}
    for turn in range(MAX_ROUNDS):
        for one in left if turn % 2 == 0 else left[::-1]:
            if not in_time():
                return summarize(left, rates)
            rate = measure(one)
            if rate is not None:
                rates[one].append(rate)
        left = [one for one in left if rates[one]]
        if turn + 1 >= MIN_ROUNDS:
            found = summarize(left, rates)
            if not found or all(
                found.median(one) >= (1 - EQUIVALENCE) * found.median(found.best) for one in found.ties
            ):
                return found
            left = [one for one in left if one in (found.best, *found.ties, *always)]
        else:
            left = keep_faster_half(left, rates, always, FIRST_ROUND_SLACK if turn == 0 else 0.0)
    return summarize(left, rates)


def keep_faster_half(left: Sequence[T], rates: dict[T, list[float]], always: Sequence[T], near: float) -> list[T]:
    """Return the faster half of the candidates, with those so `near` it, in their order."""
    medians = {one: statistics.median(rates[one]) for one in left}
    ranked = sorted(left, key=lambda one: -medians[one])
    if len(ranked) <= MIN_SURVIVORS:
        return list(left)
    bar = medians[ranked[(len(ranked) + 1) // 2 - 1]] * (1 - near)
    return [one for one in left if medians[one] >= bar or one in always]


def summarize(left: Sequence[T], rates: dict[T, list[float]]) -> ComparisonResult[T] | None:
    """Return the best of those that are left by its median, and whom it does not lead."""
    measured = [one for one in left if rates[one]]
    if not measured:
        return None
    best = max(measured, key=lambda one: statistics.median(rates[one]))
    ties = tuple(one for one in measured if one is not best and not is_significantly_faster(rates[best], rates[one]))
    return ComparisonResult(best, ties, {one: seen for one, seen in rates.items() if seen})


def is_significantly_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Tell whether one was faster in so many of the turns in which both ran that it is hardly chance (a sign test)."""
    turns = list(zip(ours, theirs, strict=False))
    won = sum(one > other for one, other in turns)
    tail = sum(math.comb(len(turns), more) for more in range(won, len(turns) + 1)) / 2 ** len(turns)
    return len(turns) >= MIN_ROUNDS and tail < SIGNIFICANCE
