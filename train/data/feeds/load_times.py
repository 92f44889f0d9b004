"""Where the time goes that a rank spends on loading its batches."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from threading import Lock
from typing import Literal

# With more threads than this, a file system is not faster.
MAX_THREADS = 64
# Files from which on the times to read and decode one are known well enough.
MEASURED_FILES = 64
Part = Literal["disk", "decode", "copy"]


@dataclass
class LoadTimes:
    """Seconds of one rank: of its threads to read and to decode files, and of its training loop.

    The loop's own are the time that it waited for batches, and the time to bring them to the model's device.
    """

    read_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    copy_s: float = 0.0
    files: int = 0
    lock: Lock = field(default_factory=Lock, repr=False)

    def add(self, read_s: float, decode_s: float, files: int) -> None:
        """Add what one task of a thread took."""
        with self.lock:
            self.read_s += read_s
            self.decode_s += decode_s
            self.files += files

    def threads_to_keep_busy(self, cores: int) -> int:
        """Return how many threads keep so many cores busy, although each of them waits for files."""
        if self.files < MEASURED_FILES:
            return cores
        return min(MAX_THREADS, ceil(cores * (1 + self.read_s / max(self.decode_s, 1e-9)) - 0.5))

    def report(self, train_seconds: float, threads: int) -> LoadReport:
        """Return what the loading cost a training of so many seconds."""
        part: Part = "disk" if self.read_s > self.decode_s else "decode"
        files = max(1, self.files)
        return LoadReport(
            share=min(1.0, (self.wait_s + self.copy_s) / train_seconds) if train_seconds else 0.0,
            part="copy" if self.copy_s > self.wait_s else part,
            read_ms=1000 * self.read_s / files,
            decode_ms=1000 * self.decode_s / files,
            workers=threads,
        )


@dataclass(frozen=True, order=True)
class LoadReport:
    """The share of the training that a rank spent on its data (0 to 1), the slow part, and ms a file of a thread."""

    share: float
    part: Part
    read_ms: float
    decode_ms: float
    workers: int

    def text(self, planned: int) -> str:
        """Return a line about the loading, empty if it took little and needed no more threads than planned."""
        took = f"{self.workers} workers, {self.read_ms:.1f} ms to read a file, {self.decode_ms:.1f} ms to decode it"
        if self.share >= MIN_REPORTED_SHARE:
            return f"{100 * self.share:.0f} % of the training, mostly {WHAT[self.part]}; {took}"
        return took if self.workers > planned else ""


MIN_REPORTED_SHARE = 0.05
WHAT: dict[Part, str] = {"disk": "reading files", "decode": "decoding", "copy": "transforms and copies"}
