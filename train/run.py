"""What the epochs of a run work with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train.batches import Feed
from train.group import Group
from train.loop import Learner
from train.progress import Progress
from train.record import Recorder
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

    @property
    def log_interval(self) -> int:
        """Steps between log lines: by default an epoch is cut into up to five, of at least 20 steps."""
        asked, steps = self.settings.log_interval, self.feed.steps_per_epoch
        return -(-steps // max(1, min(5, steps // 20))) if asked == "auto" else asked
