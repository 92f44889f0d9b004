"""Return freed memory of the heap to the kernel once in a while."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

# A trimmed page costs a fault when it is used again, so short epochs do not trim each time.
TRIM_INTERVAL_S = 60.0


class HeapTrimmer:
    """Trims glibc's heap (malloc_trim(3)) at most once per interval.

    Why: the plan lets glibc keep freed memory. Training, evaluation and checkpoints need blocks of different sizes.
    A small object in a freed block makes the next large one grow the heap, epoch after epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock, self.last = clock, clock()
        self.malloc_trim = ctypes.CDLL(None).malloc_trim

    def trim_if_due(self) -> None:
        """Return freed pages to the kernel if the interval has passed."""
        if self.clock() - self.last >= TRIM_INTERVAL_S:
            self.last = self.clock()
            self.malloc_trim(ctypes.c_size_t(0))
