"""The contest: the fastest wins through noise, equals are no gain, and slow plans cost one trial."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from entrypoint.tune import search
from entrypoint.tune.candidates import Candidate
from entrypoint.tune.search import ROUNDS, Search, is_gain
from entrypoint.tune.trial import TrialSpec

FIELD = {"": 100.0, "a": 120.0, "b": 90.0, "c": 60.0, "d": 40.0, "e": 80.0, "f": 70.0, "g": 30.0}
SPEC = TrialSpec((), {}, 1.0)


def plans(speeds: Mapping[str, float]) -> list[dict[str, str]]:
    """Return plans by their names; the untuned one has none."""
    return [{"NAME": name} for name in speeds if name]


class Machine:
    """A machine whose speed wanders for all alike, and flickers for each; a speed of 0 cannot run."""

    def __init__(self, speeds: Mapping[str, float], noise: float = 0.0, seed: int = 0) -> None:
        self.speeds, self.noise, self.random = speeds, noise, random.Random(seed)
        self.drift, self.turns = 1.0, Counter[str]()

    def run(self, _spec: TrialSpec, variables: Mapping[str, str]) -> float | str:
        name = variables.get("NAME", "")
        self.turns[name] += 1
        self.drift *= self.random.uniform(0.95, 1.05)
        return self.speeds[name] * self.drift * self.random.gauss(1, self.noise) or "it fell over"


def compared(patch: pytest.MonkeyPatch, machine: Machine) -> list[Candidate]:
    """Return the finalists of a machine's plans."""
    patch.setattr(search, "run_trial", machine.run)
    return Search(SPEC, time.monotonic() + 100).compare(plans(machine.speeds))


def test_fastest_of_noisy_plans_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    contests = [compared(monkeypatch, Machine(FIELD, 0.03, seed)) for seed in range(100)]
    assert sum(one[0].variables == {"NAME": "a"} and is_gain(one) for one in contests) >= 90


def test_equal_plan_is_rarely_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    contests = [compared(monkeypatch, Machine({"": 100.0, "a": 100.0}, 0.03, seed)) for seed in range(200)]
    assert sum(map(is_gain, contests)) <= 20


def test_slow_plans_run_once_and_the_untuned_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FIELD | {"": 20.0}, 0.01)
    assert compared(monkeypatch, machine)[0].variables == {"NAME": "a"}
    assert machine.turns == {**dict.fromkeys("cdefg", 1), **dict.fromkeys(("", "a", "b"), ROUNDS + 1)}


@pytest.mark.parametrize(("speeds", "best"), [({"": 0.0, "b": 1.0}, "b"), ({"": 1.0, "b": 0.0}, "")])
def test_plan_that_cannot_run_is_named_and_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], speeds: dict[str, float], best: str
) -> None:
    machine = Machine(speeds)
    finalists = compared(monkeypatch, machine)
    assert (finalists[0].variables.get("NAME", ""), is_gain(finalists)) == (best, bool(best))
    assert sum(machine.turns.values()) == ROUNDS + 2
    failed = next(name for name, speed in speeds.items() if not speed)
    assert f"cannot run  {f'NAME={failed}' if failed else 'as planned'}: it fell over\n" in capsys.readouterr().err


def test_plan_that_failed_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"": 0.0, "a": 0.0})
    monkeypatch.setattr(search, "run_trial", machine.run)
    running = Search(SPEC, time.monotonic() + 100)
    assert [running.compare(plans(machine.speeds)) for _ in range(2)] == [[], []]
    assert machine.turns == {"": 1, "a": 1}


def test_contest_ends_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(FIELD)
    monkeypatch.setattr(search, "run_trial", machine.run)
    with pytest.raises(TimeoutError):
        Search(SPEC, time.monotonic()).compare(plans(FIELD))
    assert not machine.turns


@pytest.mark.parametrize(
    ("ours", "theirs", "so"),
    [
        ([2, 2, 2, 2, 2], [1, 1, 1, 1, 1], True),
        ([2, 2, 2, 2, 0], [1, 1, 1, 1, 1], False),
        ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], False),
    ],
)
def test_gain_is_one_of_every_turn(ours: Sequence[float], theirs: Sequence[float], so: bool) -> None:
    assert is_gain([Candidate({"NAME": "a"}, [0, *ours]), Candidate({}, [9, *theirs])]) is so
