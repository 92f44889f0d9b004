"""What a signal does to a run: an end at once, or after the step under way."""

from __future__ import annotations

import signal

import pytest

from train import stopping
from train.stopping import Stopped, Stopping


def test_before_anything_is_worth_saving_a_signal_ends_it_at_once() -> None:
    with pytest.raises(Stopped) as caught:
        Stopping().take(signal.SIGTERM, None)
    assert caught.value.number == signal.SIGTERM


def test_where_no_checkpoints_are_wanted_it_does_too() -> None:
    one = Stopping()
    with one.deferred(worth_saving=False), pytest.raises(Stopped):
        one.take(signal.SIGTERM, None)


def test_a_run_that_saves_is_asked_first_and_ended_by_the_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Stopping()
    clock = [100.0]
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock[0])
    with one.deferred(worth_saving=True):
        assert not one.asked
        one.take(signal.SIGINT, None)
        assert one.asked
        assert one.name == "SIGINT"
        clock[0] += 0.5
        one.take(signal.SIGTERM, None)  # the launcher passes on what the terminal has sent already
        assert one.name == "SIGINT"
        clock[0] += 1
        with pytest.raises(Stopped):
            one.take(signal.SIGTERM, None)


def test_a_schedulers_warning_asks_at_any_time_and_is_not_the_first_of_two() -> None:
    one = Stopping()
    one.take(signal.SIGUSR1, None)  # while the data are read: the run will save after its first step
    with one.deferred(worth_saving=True):
        assert one.asked
        one.take(signal.SIGTERM, None)  # the end that it warned of
        assert one.name == "SIGTERM"


def test_a_warning_to_a_run_that_saves_nothing_is_nothing() -> None:
    one = Stopping()
    one.take(signal.SIGUSR1, None)
    with one.deferred(worth_saving=False):
        assert not one.asked
        one.take(signal.SIGUSR1, None)
        assert not one.asked
