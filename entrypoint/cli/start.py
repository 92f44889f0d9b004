"""The moment at which this process began, and the CPU load then."""

from __future__ import annotations

import time
from typing import Self

from msgspec import Struct

from entrypoint.machine.cpu_load import LoadSample, take_sample


class ProcessStart(Struct, frozen=True):
    """The wall-clock time at which this process began, and the CPU time that all processes had used."""

    time_s: float
    load: LoadSample

    @classmethod
    def now(cls) -> Self:
        """Return this moment."""
        return cls(time.time(), take_sample())
