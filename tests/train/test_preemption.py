"""What a signal does to a run: an end at once, or after the step under way."""

from __future__ import annotations

import signal
import subprocess

import pytest

from tests.conftest import PYTHON
from train import preemption
from train.preemption import CONTINUE, SAVE, STOP, Deadline, StopController, StopSignal, first_deadline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of a monotonic clock that a test moves."""
    seconds = [100.0]
    monkeypatch.setattr(preemption.time, "monotonic", lambda: seconds[0])
    return seconds


def test_signal_outside_defer_stops_at_once() -> None:
    with pytest.raises(StopSignal) as caught:
        StopController().handle(signal.SIGTERM, None)
    assert caught.value.number == signal.SIGTERM


def test_signal_without_checkpoints_stops_at_once() -> None:
    one = StopController()
    with one.defer(can_save=False), pytest.raises(StopSignal):
        one.handle(signal.SIGTERM, None)


def test_saving_run_ends_only_by_the_second_signal(clock: list[float]) -> None:
    one = StopController()
    with one.defer(can_save=True):
        assert not one.stop_requested
        one.handle(signal.SIGINT, None)
        assert one.stop_requested
        assert one.reason == "SIGINT"
        clock[0] += 0.5
        one.handle(signal.SIGTERM, None)  # the launcher passes on what the terminal has sent already
        assert one.reason == "SIGINT"
        clock[0] += 1
        with pytest.raises(StopSignal):
            one.handle(signal.SIGTERM, None)


def test_later_sighup_is_no_second_signal(clock: list[float]) -> None:
    one = StopController()
    with one.defer(can_save=True):
        one.handle(signal.SIGHUP, None)
        assert (one.stop_requested, one.reason) == (True, "SIGHUP")
        for number in (signal.SIGPIPE, signal.SIGHUP):
            clock[0] += 5
            one.handle(number, None)
        with pytest.raises(StopSignal):
            one.handle(signal.SIGTERM, None)


def test_inherited_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    ignored = {signal.SIGHUP: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}
    monkeypatch.setattr(signal, "getsignal", lambda number: ignored.get(number, signal.SIG_DFL))
    monkeypatch.setattr(signal, "signal", lambda number, _: taken.append(number))
    StopController().install()
    assert taken == [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]


def test_repeated_save_request_just_after_a_save_is_ignored(clock: list[float]) -> None:
    one = StopController()
    one.mark_saved()  # another rank had the signal first
    clock[0] += 0.5
    one.handle(signal.SIGUSR2, None)
    assert one.request == CONTINUE
    clock[0] += 1
    one.handle(signal.SIGUSR2, None)
    assert one.request == SAVE


def test_scheduler_warning_is_no_first_signal() -> None:
    one = StopController()
    one.handle(signal.SIGUSR1, None)  # while the data are read: the run will save after its first step
    with one.defer(can_save=True):
        assert one.stop_requested
        one.handle(signal.SIGTERM, None)  # the end that it warned of
        assert one.reason == "SIGTERM"


def test_warning_without_checkpoints_is_ignored() -> None:
    one = StopController()
    one.handle(signal.SIGUSR1, None)
    with one.defer(can_save=False):
        assert not one.stop_requested
        one.handle(signal.SIGUSR1, None)
        assert not one.stop_requested


def test_save_request_waits_for_a_step_and_stop_comes_first() -> None:
    one = StopController()
    one.handle(signal.SIGUSR2, None)
    assert one.request == SAVE
    with one.defer(can_save=True):
        one.handle(signal.SIGUSR2, None)
        assert one.request == SAVE
        one.handle(signal.SIGTERM, None)
        assert one.request == STOP
    assert StopController().request == CONTINUE


JOB = {"SLURM_JOB_ID": "7"}


@pytest.mark.parametrize(
    ("minutes", "environ", "left_s", "name"),
    [
        (None, {}, None, ""),
        (2.0, {}, 60, "TRAIN_MAX_MINUTES=2"),
        (None, JOB | {"SLURM_JOB_END_TIME": "1100"}, 70, "the end of the Slurm job"),
        (2.0, JOB | {"SLURM_JOB_END_TIME": "1100"}, 60, "TRAIN_MAX_MINUTES=2"),
        (30.0, JOB | {"SLURM_JOB_END_TIME": "1100"}, 70, "the end of the Slurm job"),
        (None, JOB | {"SLURM_JOB_END_TIME": "Unknown"}, None, ""),
        (0.1, {}, -54, "TRAIN_MAX_MINUTES=0.1"),
        (None, JOB | {"SLURM_JOB_END_TIME": "930"}, None, ""),
        (None, {"SLURM_JOB_END_TIME": "1100"}, None, ""),
    ],
)
def test_earlier_deadline_counts(
    monkeypatch: pytest.MonkeyPatch, minutes: float | None, environ: dict[str, str], left_s: float | None, name: str
) -> None:
    monkeypatch.setattr(preemption.time, "time", lambda: 1000.0)
    monkeypatch.setattr(preemption.time, "monotonic", lambda: 5.0)
    found = first_deadline(minutes, 30, started=940.0, environ=environ)
    assert found == (None if left_s is None else Deadline(5.0 + left_s, name))


def test_deadline_ignores_clock_changes(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    one = StopController()
    with one.defer(can_save=True, deadline=Deadline(110.0, "TRAIN_MAX_MINUTES=1")):
        assert one.request == CONTINUE
        monkeypatch.setattr(preemption.time, "time", lambda: 0.0)
        clock[0] = 110.0
        assert one.request == STOP
        assert one.reason == "TRAIN_MAX_MINUTES=1"
    with one.defer(can_save=False, deadline=Deadline(110.0, "TRAIN_MAX_MINUTES=1")):
        assert not one.stop_requested


CALLBACK = """
import os, signal, time, weakref
from train.preemption import STOP_CONTROLLER, StopSignal

class Referent:
    pass

def interrupted(_):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.001)

STOP_CONTROLLER.install()
referent = Referent()
reference = weakref.ref(referent, interrupted)
try:
    del referent
    time.sleep(9)
except StopSignal as stopped:
    print("stopped by", stopped.number)
"""


@pytest.mark.launch
def test_signal_in_a_callback_stops_too() -> None:
    """Python only prints what is raised in a callback, as of the locks of its imports."""
    done = subprocess.run([PYTHON, "-c", CALLBACK], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"stopped by {int(signal.SIGTERM)}\n", "")
