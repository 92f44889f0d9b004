"""Finds the fastest of several noisy candidates: measured in rounds, the slower half dropped after each."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from msgspec import Struct

T = TypeVar("T", bound=Hashable)

# A lead is significant if its probability by chance is smaller than this.
SIGNIFICANCE = 0.05
# A result takes at least MIN_ROUNDS rounds. After MAX_ROUNDS the search stops to distinguish candidates.
MIN_ROUNDS, MAX_ROUNDS = 5, 15
# The first rounds are noisy: candidates this near to the faster half stay too.
SLACK = 0.05
# Candidates whose medians differ by less are equally fast. They are not measured further.
EQUIVALENCE = 0.02
# With so few candidates, only a significant lead drops one of them.
MIN_SURVIVORS = 3


class ComparisonResult(Struct, Generic[T], frozen=True):
    """The candidate with the best median rate, the candidates that are not significantly slower, and all rates."""

    best: T
    ties: tuple[T, ...]
    rates: dict[T, list[float]]

    def median(self, candidate: T) -> float:
        """Return a candidate's median rate."""
        return statistics.median(self.rates[candidate])


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
    remaining, rates = list(candidates), {candidate: list[float]() for candidate in candidates}
    for round_index in range(MAX_ROUNDS):
        for candidate in remaining if round_index % 2 == 0 else remaining[::-1]:
            if not in_time():
                return summarize(remaining, rates)
            rate = measure(candidate)
            if rate is not None:
                rates[candidate].append(rate)
        remaining = [candidate for candidate in remaining if rates[candidate]]
        if round_index + 1 >= MIN_ROUNDS:
            result = summarize(remaining, rates)
            if not result or all(
                result.median(candidate) >= (1 - EQUIVALENCE) * result.median(result.best) for candidate in result.ties
            ):
                return result
            remaining = [candidate for candidate in remaining if candidate in (result.best, *result.ties, *always)]
        else:
            remaining = keep_faster_half(remaining, rates, always)
    return summarize(remaining, rates)


def keep_faster_half(remaining: Sequence[T], rates: dict[T, list[float]], always: Sequence[T]) -> list[T]:
    """Return the faster half of the candidates, and those near to it, in their order."""
    medians = {candidate: statistics.median(rates[candidate]) for candidate in remaining}
    ranked = sorted(remaining, key=lambda candidate: -medians[candidate])
    if len(ranked) <= MIN_SURVIVORS:
        return list(remaining)
    cutoff = medians[ranked[(len(ranked) + 1) // 2 - 1]] * (1 - SLACK)
    return [candidate for candidate in remaining if medians[candidate] >= cutoff or candidate in always]


def summarize(remaining: Sequence[T], rates: dict[T, list[float]]) -> ComparisonResult[T] | None:
    """Return the best remaining candidate by median rate, and those that are not significantly slower."""
    measured = [candidate for candidate in remaining if rates[candidate]]
    if not measured:
        return None
    best = max(measured, key=lambda candidate: statistics.median(rates[candidate]))
    ties = tuple(
        candidate
        for candidate in measured
        if candidate is not best and not is_significantly_faster(rates[best], rates[candidate])
    )
    return ComparisonResult(best, ties, {candidate: seen for candidate, seen in rates.items() if seen})


def is_significantly_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether one candidate was faster in significantly many of their common rounds (a sign test)."""
    rounds = list(zip(ours, theirs, strict=False))
    won = sum(mine > other for mine, other in rounds)
    tail = sum(math.comb(len(rounds), more) for more in range(won, len(rounds) + 1)) / 2 ** len(rounds)
    return len(rounds) >= MIN_ROUNDS and tail < SIGNIFICANCE
