"""Signals that ask a run to end: at once while nothing is worth saving, else after a step that all ranks agree on."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from entrypoint.errors import Exit, Refused

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# What a scheduler sends ahead of the end (`sbatch --signal=USR1@120`): it only ever asks.
WARNING = signal.SIGUSR1
# A launcher and the terminal may both pass one signal on: what follows so soon is the same one.
ECHO_S = 1.0


class Stopped(BaseException):
    """A signal asked the trainer to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Preempted(Refused):
    """A run that was asked to end has saved a checkpoint, and goes on from it when it is run again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, Exit.PREEMPTED)


class Stopping:
    """What the signals of this process have asked for: `number` is the signal, None until one came."""

    def __init__(self) -> None:
        self.number: int | None = None
        self.deferring = False
        self.saves = True
        self.since = 0.0

    @property
    def asked(self) -> bool:
        """Tell whether the run is to end as soon as it has saved."""
        return self.number is not None

    @property
    def name(self) -> str:
        """Return the signal's name; on a rank that got none, another rank has."""
        return "another rank's signal" if self.number is None else signal.Signals(self.number).name

    def listen(self) -> None:
        """Take this process's signals."""
        for number in SIGNALS:
            signal.signal(number, self.take)

    def ignore(self) -> None:
        """Ignore this process's signals: it ends anyway, and the code that it ends with is settled.

        A launcher ends all ranks as soon as it has seen the first one end.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def take(self, number: int, _: FrameType | None) -> None:
        """Note the first signal while deferring; else raise `Stopped` where the program stands.

        A warning is noted at any time, if the run saves at all, and does not count as the first of two.
        """
        now = time.monotonic()
        if number == WARNING:
            if self.saves and self.number is None:
                self.number = number
            return
        if self.number == WARNING:
            self.number = None
        if self.deferring and (self.number is None or now - self.since < ECHO_S):
            self.number = self.number or number
            self.since = self.since or now
            return
        raise Stopped(number)

    @contextmanager
    def deferred(self, *, worth_saving: bool) -> Iterator[None]:
        """Let signals wait for the next step inside this block, where the run saves checkpoints at all."""
        self.deferring = self.saves = worth_saving
        if not worth_saving and self.number == WARNING:
            self.number = None
        try:
            yield
        finally:
            self.deferring = False


# Signals are the process's, and so is what they have asked for.
STOPPING = Stopping()
