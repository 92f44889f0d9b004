"""State of a training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from train.acceleration.heap import HeapTrimmer
from train.checkpoint.async_writer import AsyncCheckpointWriter
from train.checkpoint.metadata import DataFingerprint
from train.data.feeds.batches import BatchSource
from train.distributed.process_group import ProcessGroup
from train.engine.builder import ModelBuilder
from train.engine.train_step import Trainer
from train.evaluation.mistakes import MistakeCollector
from train.lock_file import RunLock
from train.report.cpu_wait import CpuWaitMeter
from train.report.metrics import MetricsWriter
from train.report.profiler import Profiler, no_phase
from train.report.progress import ProgressReporter
from train.settings import TrainSettings


@dataclass
class TrainingRun:
    """Objects that a run's epochs use; `metrics` is None except on rank 0.

    `data` is what the run knows of its data set. `skipped` are the files that were left out before the first batch.
    `mistakes` are those of the last evaluation on this rank. `save_group` is the process group of the threads that save
    a sharded model.
    """

    settings: TrainSettings
    group: ProcessGroup
    source: BatchSource
    trainer: Trainer
    folder: Path
    metrics: MetricsWriter | None
    progress: ProgressReporter
    first_epoch: int
    model_builder: ModelBuilder
    lock: RunLock
    checkpoint_writer: AsyncCheckpointWriter
    data: DataFingerprint
    skipped: tuple[str, ...] = ()
    save_group: dist.ProcessGroup | None = None
    profiler: Profiler | None = None
    mistakes: MistakeCollector | None = None
    cpu_wait: CpuWaitMeter = field(default_factory=CpuWaitMeter)
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)

    def advance_profiler(self) -> None:
        """Advance the profiler by one step, and remove it when it is done."""
        if self.profiler and self.profiler.step():
            self.profiler, self.trainer.mark_phase = None, no_phase

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of the model's outputs."""
        return self.data.classes

    @property
    def choice(self) -> str:
        """Which images choose the best checkpoint: `val`, or `test` where there are no others."""
        return "val" if self.source.has_val else "test"

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.settings.total_steps(self.source.steps_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs of the run; the last one may be incomplete."""
        return self.settings.total_epochs(self.source.steps_per_epoch)

    @property
    def log_interval(self) -> int:
        """Steps between log lines; by default up to five lines an epoch, at least 20 steps apart."""
        asked, steps = self.settings.log_interval, self.source.steps_per_epoch
        return -(-steps // max(1, min(5, steps // 20))) if asked == "auto" else asked
