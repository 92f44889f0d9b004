"""The contest: the fastest wins through noise, equals tie, and slow ones cost few turns."""

from __future__ import annotations

import random

import pytest

from entrypoint.tune.candidates import Candidate
from entrypoint.tune.successive_halving import (
    MAX_ROUNDS,
    MIN_ROUNDS,
    Ranking,
    is_significantly_faster,
    successive_halving,
)

FIELD = {"": 100.0, "a": 120.0, "b": 90.0, "c": 60.0, "d": 40.0, "e": 80.0, "f": 70.0, "g": 30.0}


class Contest:
    """A machine whose speed wanders for all alike, and flickers for each; a speed of 0 cannot run."""

    def __init__(self, speeds: dict[str, float], noise: float = 0.0, seed: int = 0) -> None:
        self.speeds, self.noise, self.random = speeds, noise, random.Random(seed)
        self.drift = 1.0
        self.candidates = {name: Candidate({"NAME": name} if name else {}) for name in speeds}
        self.turns = dict.fromkeys(speeds, 0)

    def measure(self, candidate: Candidate) -> None:
        name = candidate.variables.get("NAME", "")
        self.turns[name] += 1
        self.drift *= self.random.uniform(0.95, 1.05)
        if rate := self.speeds[name] * self.drift * self.random.gauss(1, self.noise):
            candidate.rates.append(rate)

    def winner(self) -> Ranking:
        ranking = successive_halving(list(self.candidates.values()), self.measure)
        assert ranking
        return ranking


def test_halving_finds_the_fastest_of_noisy_rates() -> None:
    won = 0
    for seed in range(100):
        contest = Contest(FIELD, 0.03, seed)
        ranking = contest.winner()
        won += ranking.best is contest.candidates["a"]
        assert contest.candidates["g"] not in ranking.ties
    assert won >= 95


def test_halving_equal_candidates_tie_within_max_rounds() -> None:
    distinguished = 0
    for seed in range(100):
        contest = Contest({"a": 100.0, "b": 100.0}, 0.03, seed)
        distinguished += not contest.winner().ties
        assert max(contest.turns.values()) <= MAX_ROUNDS
    assert distinguished <= 30  # looked at after every turn from the fifth on, chance has more than one chance


def test_halving_drops_the_slow_half_but_keeps_the_untuned_plan() -> None:
    contest = Contest(FIELD | {"": 20.0}, 0.01)
    ranking = contest.winner()
    assert ranking.best is contest.candidates["a"]
    assert ranking.beats_untuned
    assert contest.turns["g"] == contest.turns["d"] == 1
    assert contest.turns[""] == MIN_ROUNDS


def test_halving_drops_candidate_that_cannot_run() -> None:
    contest = Contest({"a": 0.0, "b": 1.0})
    ranking = contest.winner()
    assert (str(ranking.best), ranking.ties, contest.turns["a"]) == ("NAME=b", (), 1)
    alone = Contest({"a": 0.0})
    assert successive_halving(list(alone.candidates.values()), alone.measure) is None


def test_halving_out_of_time_uses_measured_rates() -> None:
    left = iter([True] * 5 + [False] * 100)
    contest = Contest(FIELD)
    ranking = successive_halving(list(contest.candidates.values()), contest.measure, lambda: next(left))
    assert ranking
    assert ranking.best is contest.candidates["a"]
    assert contest.candidates["b"] in ranking.ties
    assert {name for name, one in contest.candidates.items() if one.rates} == {"", "a", "b", "c", "d"}


@pytest.mark.parametrize(
    ("ours", "theirs", "so"),
    [
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True),
        ([2, 2, 2, 2], [1, 1, 1, 1], False),
        ([2, 2, 2, 2, 0], [1, 1, 1, 1, 1], False),
        ([2] * 7 + [0], [1] * 8, True),
        ([1] * 15, [1] * 15, False),
    ],
)
def test_is_significantly_faster_rejects_chance(ours: list[float], theirs: list[float], so: bool) -> None:
    assert is_significantly_faster(ours, theirs) is so
