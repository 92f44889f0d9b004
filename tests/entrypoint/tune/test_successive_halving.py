"""The contest: the fastest wins through noise, equals tie, and slow ones cost few turns."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from entrypoint.tune.successive_halving import MAX_ROUNDS, MIN_ROUNDS, is_significantly_faster, successive_halving


def noisy(speeds: dict[str, float], noise: float, seed: int, counted: Counter[str]) -> Callable[[str], float | None]:
    """Return a machine whose speed wanders for all alike, and flickers for each; a speed of 0 cannot run."""
    random_ = random.Random(seed)
    drift = [1.0]

    def measure(one: str) -> float | None:
        counted[one] += 1
        drift[0] *= random_.uniform(0.95, 1.05)
        return speeds[one] * drift[0] * random_.gauss(1, noise) or None

    return measure


FIELD = {"as planned": 100.0, "a": 120.0, "b": 90.0, "c": 60.0, "d": 40.0, "e": 80.0, "f": 70.0, "g": 30.0}


def test_halving_finds_the_fastest_of_noisy_rates() -> None:
    won = 0
    for seed in range(100):
        found = successive_halving(list(FIELD), noisy(FIELD, 0.03, seed, Counter()), ["as planned"])
        assert found
        won += found.best == "a"
        assert "g" not in found.ties
    assert won >= 95


def test_halving_equal_candidates_tie_within_max_rounds() -> None:
    told_apart = 0
    for seed in range(100):
        counted: Counter[str] = Counter()
        found = successive_halving(["a", "b"], noisy({"a": 100.0, "b": 100.0}, 0.03, seed, counted))
        assert found
        told_apart += not found.ties
        assert max(counted.values()) <= MAX_ROUNDS
    assert told_apart <= 30  # looked at after every turn from the fifth on, chance has more than one chance


def test_halving_drops_the_slow_half_but_keeps_wanted_ones() -> None:
    counted: Counter[str] = Counter()
    speeds = FIELD | {"as planned": 20.0}
    found = successive_halving(list(speeds), noisy(speeds, 0.01, 0, counted), ["as planned"])
    assert found
    assert found.best == "a"
    assert counted["g"] == counted["d"] == 1
    assert counted["as planned"] == MIN_ROUNDS


def test_halving_drops_candidate_that_cannot_run() -> None:
    counted: Counter[str] = Counter()
    found = successive_halving(["a", "b"], noisy({"a": 0.0, "b": 1.0}, 0.0, 0, counted))
    assert found
    assert (found.best, found.ties, counted["a"]) == ("b", (), 1)
    assert successive_halving(["a"], noisy({"a": 0.0}, 0.0, 0, Counter())) is None


def test_halving_out_of_time_uses_measured_rates() -> None:
    left = iter([True] * 5 + [False] * 100)
    found = successive_halving(list(FIELD), noisy(FIELD, 0.0, 0, Counter()), in_time=lambda: next(left))
    assert found
    assert found.best == "a"
    assert "b" in found.ties
    assert set(found.rates) == {"as planned", "a", "b", "c", "d"}


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
