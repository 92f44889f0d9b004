"""Finds the fastest of several noisy candidates: measured in rounds, the slower half dropped after each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from entrypoint.tune.candidates import Candidate

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


class Ranking(Struct, frozen=True):
    """The candidate with the best median rate, and the candidates that are not significantly slower."""

    best: Candidate
    ties: tuple[Candidate, ...]

    @property
    def is_settled(self) -> bool:
        """Return whether all that is not significantly slower is as fast."""
        return all(candidate.rate >= (1 - EQUIVALENCE) * self.best.rate for candidate in self.ties)

    @property
    def beats_untuned(self) -> bool:
        """Return whether the best candidate is significantly faster than the untuned plan."""
        return all(candidate.variables for candidate in (self.best, *self.ties))


def successive_halving(
    candidates: Sequence[Candidate],
    measure: Callable[[Candidate], None],
    in_time: Callable[[], bool] = lambda: True,
) -> Ranking | None:
    """Rank candidates after rounds in which `measure` adds a rate to each, or none to one that cannot run.

    Successive halving (Jamieson and Talwalkar, 2016, arXiv:1502.07943).
    Each round runs all remaining candidates, so that other load on the machine affects all of them alike.
    The untuned plan is never dropped. Returns None if no candidate can run.
    """
    remaining = list(candidates)
    for round_index in range(MAX_ROUNDS):
        for candidate in remaining if round_index % 2 == 0 else remaining[::-1]:
            if not in_time():
                return rank(remaining)
            measure(candidate)
        remaining = [candidate for candidate in remaining if candidate.rates]
        if round_index + 1 < MIN_ROUNDS:
            remaining = keep_faster_half(remaining)
            continue
        ranking = rank(remaining)
        if not ranking or ranking.is_settled:
            return ranking
        remaining = [one for one in remaining if one in (ranking.best, *ranking.ties) or not one.variables]
    return rank(remaining)


def keep_faster_half(remaining: list[Candidate]) -> list[Candidate]:
    """Return the faster half of the candidates, those near to it, and the untuned plan, in their order."""
    if len(remaining) <= MIN_SURVIVORS:
        return remaining
    rates = sorted((candidate.rate for candidate in remaining), reverse=True)
    cutoff = rates[(len(rates) + 1) // 2 - 1] * (1 - SLACK)
    return [candidate for candidate in remaining if candidate.rate >= cutoff or not candidate.variables]


def rank(remaining: Sequence[Candidate]) -> Ranking | None:
    """Return the best remaining candidate by median rate, and those that are not significantly slower."""
    measured = [candidate for candidate in remaining if candidate.rates]
    if not measured:
        return None
    best = max(measured, key=lambda candidate: candidate.rate)
    others = (candidate for candidate in measured if candidate is not best)
    return Ranking(best, tuple(other for other in others if not is_significantly_faster(best.rates, other.rates)))


def is_significantly_faster(ours: Sequence[float], theirs: Sequence[float]) -> bool:
    """Return whether one candidate was faster in significantly many of their common rounds (a sign test)."""
    rounds = list(zip(ours, theirs, strict=False))
    won = sum(mine > other for mine, other in rounds)
    tail = sum(math.comb(len(rounds), more) for more in range(won, len(rounds) + 1)) / 2 ** len(rounds)
    return len(rounds) >= MIN_ROUNDS and tail < SIGNIFICANCE
