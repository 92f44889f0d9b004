"""What the epochs of a run work with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from train.checkpoint.async_writer import Saver
from train.data.batches import Feed
from train.distributed.process_group import Group
from train.engine.builder import Blueprint
from train.engine.train_step import Learner
from train.report.cpu_wait import Waiting
from train.report.metrics import Recorder
from train.report.profiler import Profiler, unmarked
from train.report.progress import Progress
from train.report.run_lock import Lock
from train.settings import TrainSettings


@dataclass
class Run:
    """What the epochs work with; `recorder` is rank 0's alone."""

    settings: TrainSettings
    group: Group
    feed: Feed
    learner: Learner
    folder: Path
    recorder: Recorder | None
    progress: Progress
    first_epoch: int
    blueprint: Blueprint
    lock: Lock
    saver: Saver
    profiler: Profiler | None = None
    waiting: Waiting = field(default_factory=Waiting)

    def after_step(self) -> None:
        """Count a step of the profile as long as one is taken."""
        if self.profiler and self.profiler.step():
            self.profiler, self.learner.phase = None, unmarked

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.settings.total_steps(self.feed.steps_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs of the run, the last of which may be cut."""
        return self.settings.total_epochs(self.feed.steps_per_epoch)

    @property
    def log_interval(self) -> int:
        """Steps between log lines: by default an epoch is cut into up to five, of at least 20 steps."""
        asked, steps = self.settings.log_interval, self.feed.steps_per_epoch
        return -(-steps // max(1, min(5, steps // 20))) if asked == "auto" else asked
