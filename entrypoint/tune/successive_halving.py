"""Finds the fastest of several noisy candidates: measured in rounds, the slower half dropped after each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)

# A lead is significant if its probability by chance is smaller than this.
SIGNIFICANCE = 0.05
# A result takes at least MIN_ROUNDS rounds. After MAX_ROUNDS the search stops to distinguish candidates.
MIN_ROUNDS, MAX_ROUNDS = 5, 15
# After the first round, which says little, candidates this near to the last one that stays do stay too.
FIRST_ROUND_SLACK = 0.05
# Candidates whose medians differ by less are equally fast. They are not measured further.
EQUIVALENCE = 0.02
# With so few candidates, only a significant lead drops one.
MIN_SURVIVORS = 3


@dataclass(frozen=True)
class ComparisonResult(Generic[T]):
    """The candidate with the best median rate, the candidates that are not significantly slower, and all rates."""

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
    """Measure candidates in rounds and return the result; `measure` returns None for one that cannot run.

    Successive halving (Jamieson and Talwalkar, 2016, arXiv:1502.07943).
    Each round runs all remaining candidates, so that other load on the machine affects all of them alike.
    Candidates in `always` are never dropped. Returns None if no candidate can run.
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
    """Return the faster half of the candidates, and those within `near` of it, in their order."""
    medians = {one: statistics.median(rates[one]) for one in left}
    ranked = sorted(left, key=lambda one: -medians[one])
    if len(ranked) <= MIN_SURVIVORS:
        return list(left)
    bar = medians[ranked[(len(ranked) + 1) // 2 - 1]] * (1 - near)
    return [one for one in left if medians[one] >= bar or one in always]


def summarize(left: Sequence[T], rates: dict[T, list[float]]) -> ComparisonResult[T] | None:
    """Return the best remaining candidate by median rate, and those that are not significantly slower."""
    measured = [one for one in left if rates[one]]
    if not measured:
        return None
    best = max(measured, key=lambda one: statistics.median(rates[one]))
    ties = tuple(one for one in measured if one is not best and not is_significantly_faster(rates[best], rates[one]))
    return ComparisonResult(best, ties, {one: seen for one, seen in rates.items() if seen})


def is_significantly_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether one candidate was faster in significantly many of their common rounds (a sign test)."""
    turns = list(zip(ours, theirs, strict=False))
    won = sum(one > other for one, other in turns)
    tail = sum(math.comb(len(turns), more) for more in range(won, len(turns) + 1)) / 2 ** len(turns)
    return len(turns) >= MIN_ROUNDS and tail < SIGNIFICANCE
