"""What asks a run to save or end: at once while nothing is worth saving, else after a step that all ranks agree on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from entrypoint.core.errors import ExitCode, UserError
from entrypoint.core.signals import DUPLICATE_WINDOW_S, not_ignored

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# What there may be more of, none of them a person's second wish: the terminal is closed, and so is what was printed to.
OUTPUT_CLOSED = (signal.SIGHUP, signal.SIGPIPE)
# What a scheduler sends ahead of the end (`sbatch --signal=USR1@120`): it only ever asks.
PREEMPT_WARNING = signal.SIGUSR1
# What asks a run to save and go on.
SAVE_REQUEST = signal.SIGUSR2
# What a rank wants after a step; all do what is the most that any of them wants.
CONTINUE, SAVE, STOP = 0, 1, 2


class StopSignal(BaseException):
    """A signal asked the trainer to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Preempted(UserError):
    """A run that was asked to end has saved a checkpoint, and goes on from it when it is run again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.PREEMPTED)


@dataclass(frozen=True)
class Deadline:
    """When a run is to end, by `time.monotonic()`, which no change of the clock moves; and who says so."""

    at: float
    name: str


def first_deadline(
    max_minutes: float | None, grace_s: float, started: float, environ: Mapping[str, str]
) -> Deadline | None:
    """Return the sooner of TRAIN_MAX_MINUTES after `started` (Unix time, s), and the end of Slurm's job less the grace.

    Source of SLURM_JOB_END_TIME: sbatch(1); older versions do not set it, and send a signal where one is asked for.
    """
    ends: list[tuple[float, str]] = []
    if max_minutes is not None:
        ends.append((started + 60 * max_minutes, f"TRAIN_MAX_MINUTES={max_minutes:g}"))
    told = environ.get("SLURM_JOB_END_TIME", "")
    if told.isdecimal():
        ends.append((int(told) - grace_s, "the end of Slurm's job"))
    if not ends:
        return None
    end, name = min(ends)
    return Deadline(time.monotonic() + end - time.time(), name)


class StopController:
    """What was asked of this process: `number` is the signal to end, None until one came, `deadline` when it is to."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.deadline: Deadline | None = None
        self.wants_save = False
        self.saved_at = -DUPLICATE_WINDOW_S
        self.deferring = False
        self.saves = True
        self.since = 0.0

    @property
    def asked(self) -> bool:
        """Tell whether the run is to end as soon as it has saved."""
        return self.number is not None or self.deadline_passed

    @property
    def deadline_passed(self) -> bool:
        """Tell whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline.at

    @property
    def wish(self) -> int:
        """Return what this rank wants after the step under way: GO_ON, SAVE or STOP."""
        if self.asked:
            return STOP
        return SAVE if self.wants_save else CONTINUE

    @property
    def name(self) -> str:
        """Return the signal's name, or the deadline's; on a rank that knows of neither, another rank does."""
        if self.number is not None:
            closed = " (nobody reads what it prints)" if self.number == signal.SIGPIPE else ""
            return signal.Signals(self.number).name + closed
        return self.deadline.name if self.deadline and self.deadline_passed else "another rank's signal"

    def mark_saved(self) -> None:
        """Note that all ranks save: one that gets the same signal a moment later need not ask for it again."""
        self.wants_save = False
        self.saved_at = time.monotonic()

    def listen(self) -> None:
        """Take this process's signals, but for those that it was started to ignore (nohup)."""
        for number in not_ignored(HANDLED):
            signal.signal(number, self.take)

    def ignore(self) -> None:
        """Ignore this process's signals: it ends anyway, and the code that it ends with is settled.

        A launcher ends all ranks as soon as it has seen the first one end.
        """
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int, _: FrameType | None) -> None:
        """Note the first signal while deferring; else raise `Stopped` where the program stands.

        A warning is noted at any time, if the run saves at all, and does not count as the first of two.
        """
        now = time.monotonic()
        if number == SAVE_REQUEST:
            self.wants_save = now - self.saved_at >= DUPLICATE_WINDOW_S
            return
        if number == PREEMPT_WARNING:
            if self.saves and self.number is None:
                self.number = number
            return
        if self.number == PREEMPT_WARNING:
            self.number = None
        if self.deferring and self.number is not None and number in OUTPUT_CLOSED:
            return
        if self.deferring and (self.number is None or now - self.since < DUPLICATE_WINDOW_S):
            self.number = self.number or number
            self.since = self.since or now
            return
        raise StopSignal(number)

    @contextmanager
    def defer(self, *, worth_saving: bool, deadline: Deadline | None = None) -> Iterator[None]:
        """Let signals wait for the next step inside this block, where the run saves checkpoints at all."""
        self.deferring = self.saves = worth_saving
        self.deadline = deadline if worth_saving else None
        if not worth_saving and self.number == PREEMPT_WARNING:
            self.number = None
        try:
            yield
        finally:
            self.deferring, self.deadline = False, None


# Signals are the process's, and so is what they have asked for.
STOP_CONTROLLER = StopController()
