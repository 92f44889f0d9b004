"""A training run, and its set-up on every rank: data source, checkpoint to resume from, model, folder and reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from entrypoint.core.errors import UserError, count_text, printable
from entrypoint.core.files import exists
from entrypoint.core.setting_types import as_url
from entrypoint.core.settings_base import ParsedSettings, rules_of
from entrypoint.plan.model import Plan, TrainerPlan
from entrypoint.rank.verify import compare_ranks, compare_with_plan, observe_rank
from train.acceleration.torch_workarounds import HeapTrimmer
from train.checkpoint.metadata import DataFingerprint
from train.checkpoint.resume import (
    ResumePoint,
    check_length,
    compare_data,
    load_first_valid,
    map_place,
    with_own_best,
    without_scores,
)
from train.checkpoint.tensor_files import AsyncCheckpointWriter
from train.data.cache.fingerprint import check_same_data
from train.data.datasets import DataSet
from train.data.feeds.batches import BatchSource
from train.data.feeds.choose import as_learned, build_source, raw_table
from train.data.feeds.loader import BatchLoader
from train.distributed.process_group import ProcessGroup, open_save_group
from train.engine.builder import ModelBuilder
from train.engine.compile import compile_step
from train.engine.train_step import Trainer, load_teacher
from train.evaluation.evaluate import MistakeCollector
from train.lock_file import RunLock
from train.optimization.losses import Loss, training_loss
from train.planning.checks import check_epochs_after_pruning
from train.planning.image_sizes import model_input_shape
from train.planning.run_selection import may_change_settings
from train.report import run_folder
from train.report.metrics import MetricsWriter, disk_errors_as_user_errors
from train.report.profiler import Profiler, no_phase
from train.report.progress import LivePage, ProgressReporter, build_progress
from train.report.stored_run import NodeCopies
from train.report.stragglers import CpuWaitMeter
from train.report.trackers import start_tracker
from train.settings import TrainSettings
from train.transforms.normalize import Normalize


@dataclass
class TrainingRun:
    """Objects that a run's epochs use; `metrics` is None except on rank 0.

    `data` is what the run knows of its data set, such as the classes in the order of the model's outputs. `dataset` are
    the images themselves.
    `mistakes` are those of the last evaluation on this rank. `save_group` is the process group of the threads that save
    a sharded model. `copies` are the folders that the nodes have of it.
    """

    settings: TrainSettings
    group: ProcessGroup
    source: BatchSource
    trainer: Trainer
    folder: Path
    copies: NodeCopies
    metrics: MetricsWriter | None
    progress: ProgressReporter
    first_epoch: int
    model_builder: ModelBuilder
    lock: RunLock
    checkpoint_writer: AsyncCheckpointWriter
    data: DataFingerprint
    dataset: DataSet
    save_group: dist.ProcessGroup | None = None
    profiler: Profiler | None = None
    has_best_weights: bool = False
    mistakes: MistakeCollector | None = None
    cpu_wait: CpuWaitMeter = field(default_factory=CpuWaitMeter)
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)

    def advance_profiler(self) -> None:
        """Advance the profiler by one step, and remove it when it is done."""
        if self.profiler and self.profiler.step():
            self.profiler, self.trainer.mark_phase = None, no_phase

    @cached_property
    def live(self) -> LivePage | None:
        """What rank 0 shows while the run trains."""
        return LivePage(self.folder, self.metrics) if self.metrics else None

    @property
    def choice(self) -> str:
        """Which images choose the best checkpoint: `val`, or `test` where there are no others."""
        return "val" if self.source.has_val else "test"

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.settings.optim.total_steps(self.source.steps_per_epoch)

    @property
    def epochs(self) -> int:
        """Epochs of the run; the last one may be incomplete."""
        return self.settings.optim.total_epochs(self.source.steps_per_epoch)

    @property
    def log_interval(self) -> int:
        """Steps between log lines; by default up to five lines an epoch, at least 20 steps apart."""
        asked, steps = self.settings.run.log_interval, self.source.steps_per_epoch
        return -(-steps // max(1, min(5, steps // 20))) if asked == "auto" else asked


def setup_run(
    given: ParsedSettings[TrainSettings],
    plan: Plan,
    data: DataSet,
    loader: BatchLoader | None,
    group: ProcessGroup,
    lock: RunLock,
) -> TrainingRun:
    """Build the run's model, data source and outputs, and resume from a checkpoint if there is one."""
    settings = given.values
    compare_settings(settings, plan, group)
    known = exchange_fingerprints(data, settings, group)
    source = build_source(data, loader, settings, group, plan.the_trainer().normalization)
    total_steps = settings.optim.total_steps(source.steps_per_epoch)
    epochs = settings.optim.total_epochs(source.steps_per_epoch)
    check_epochs_after_pruning(settings, epochs)  # here the unreadable images are left out
    folder, starts = group.run_on_main(lambda: run_folder.open_folder(settings, lock), tuple[Path, list[Path]])
    # Rank 0 reads and broadcasts it: the folder may be on a local disk of its node.
    start = group.run_on_main(lambda: find_start(settings, source, known, starts), ResumePoint) if starts else None
    copies = NodeCopies.find(given, lock, group, folder)
    if start:
        start = replace(with_own_best(start, folder), path=copies.fetch(start.path))
        restore_normalization(source, start)
    shape = model_input_shape(settings.data, data.shape)
    loss = build_loss(settings, data, source)
    model_builder = ModelBuilder(settings, plan, shape, data.classes, group, source.sample, loss)
    trainer = model_builder.create_trainer(total_steps, start)
    trainer.teacher = load_teacher(settings, data.classes, source.normalize)
    observed = observe_rank(plan)
    ranks = group.gather(observed, type(observed))
    # Each rank compares with its own node's plan.
    surprises = group.gather(compare_with_plan(plan, observed), tuple[str, ...])
    metrics: MetricsWriter | None = None
    if group.is_main:
        with disk_errors_as_user_errors(folder):
            run_folder.write_provenance(folder, given, plan, ranks, os.environ, resumes=start is not None)
            metrics = open_metrics(folder, settings, start)
    progress = build_progress(settings.run, total_steps, epochs, is_main=group.is_main, relayed=plan.launcher == "rank")
    print_start(progress, data, start, (*chain.from_iterable(surprises), *compare_ranks(ranks)))
    run = TrainingRun(
        settings=settings,
        group=group,
        source=source,
        trainer=trainer,
        folder=copies.folder,
        copies=copies,
        metrics=metrics,
        progress=progress,
        first_epoch=start.epoch if start else 0,
        model_builder=model_builder,
        lock=lock,
        checkpoint_writer=AsyncCheckpointWriter(),
        data=known,
        dataset=data,
    )
    if settings.compute.parallelism == "fsdp":
        run.save_group = open_save_group(group, plan.collective_timeout_s)
    compile_and_profile(run)
    return run


def build_loss(settings: TrainSettings, data: DataSet, source: BatchSource) -> Loss:
    """Return the loss that a run minimizes, on its device; raises `UserError` for weights of unknown classes."""
    table = as_learned(raw_table(data.targets), source.normalize.outputs) if data.targets else None
    labels = data.trained_labels
    counts = torch.bincount(labels, minlength=len(data.classes)) if table is None else table[labels].sum(0)
    device = source.normalize.mean.device
    return training_loss(settings, data.classes, counts.to(device), None if table is None else table.to(device))


def print_start(progress: ProgressReporter, data: DataSet, start: ResumePoint | None, warnings: Sequence[str]) -> None:
    """Print warnings, which images are left out, and where the run resumes."""
    for line in (*(start.skipped if start else ()), *warnings):
        progress.print(f"warning: {line}")
    if data.skipped:
        verb = "is" if len(data.skipped) == 1 else "are"
        progress.print(f"{count_text(len(data.skipped), 'unreadable image')} {verb} left out, first {data.skipped[0]}")
    if start:
        progress.print(f"resuming from {start.path}, epoch {start.epoch + 1}, step {start.step}")
        for change in start.changes:
            progress.print(f"resuming although {change}")


def open_metrics(folder: Path, settings: TrainSettings, start: ResumePoint | None) -> MetricsWriter:
    """Return rank 0's writer; a run that begins again in a folder with metrics removes those."""
    begins_again = exists(folder / "metrics.jsonl")
    resumed_step = start.step if start else 0 if begins_again else None
    return MetricsWriter(
        folder,
        tensorboard=settings.run.tensorboard,
        track=partial(start_tracker, settings, folder, resumes=resumed_step is not None),
        resumed_step=resumed_step,
    )


def compare_settings(settings: TrainSettings, plan: Plan, group: ProcessGroup) -> None:
    """Raise `UserError` on every rank if a node was given other settings, or has another plan.

    Each node reads its own environment.
    """
    own = settings_to_compare(settings, plan.the_trainer()) if group.local_rank == 0 else None
    gathered = enumerate(group.gather(own, dict[str, Any] | None))
    (first, wanted), *others = [(node_name(group, rank), one) for rank, one in gathered if one]
    for node, theirs in others:
        for name in {**wanted, **theirs}:
            if wanted.get(name) != theirs.get(name):
                raise UserError(
                    f"{name}: is {printable(str(theirs.get(name)))} on {node} and {printable(str(wanted.get(name)))} on"
                    f" {first}. Give every node the same settings."
                )


# Of the trainer's plan: what a node's own memory, CPU and libraries decide, and what changes results by rounding alone.
# The data that are doubted are compared themselves.
PLAN_MAY_DIFFER = frozenset({"num_workers", "ipex_packs", "winograd", "doubts"})


def settings_to_compare(settings: TrainSettings, plan: TrainerPlan) -> dict[str, Any]:
    """Return what must be the same on every node, as JSON types by the user's names."""
    rules = rules_of(TrainSettings)
    own = {f"TRAIN_{name.upper()}": one for name, one in settings.to_json().items() if rules[name].nodes == "same"}
    planned = {name: one for name, one in msgspec.to_builtins(plan).items() if name not in PLAN_MAY_DIFFER}
    return {**own, **{f"the planned {name.replace('_', ' ')}": one for name, one in planned.items()}}


def node_name(group: ProcessGroup, rank: int) -> str:
    """Return the name of a rank's node."""
    node = group.node_of(rank)
    return f"{node} (rank {rank})" if node else f"rank {rank}"


def exchange_fingerprints(data: DataSet, settings: TrainSettings, group: ProcessGroup) -> DataFingerprint:
    """Return what rank 0 knows of its data; raises `UserError` on every rank if another node has other data.

    The name of the copy of what is in object storage says which state that had: ranks must not have two of them.
    """
    url = as_url(settings.data.data_dir)
    if url and data.listings and len(set(group.gather(data.listings[0].folder.name, str))) > 1:
        raise UserError(f"TRAIN_DATA_DIR={printable(url)}: changed while the ranks began. Start the run again.")
    own = data.fingerprint(settings) if group.local_rank == 0 else None
    found = group.gather(own, DataFingerprint | None)
    check_same_data([(node_name(group, rank), one) for rank, one in enumerate(found) if one])
    assert found[0] is not None, "rank 0 is the first rank of its node"
    return found[0]


def find_start(settings: TrainSettings, source: BatchSource, data: DataFingerprint, starts: list[Path]) -> ResumePoint:
    """Return the newest valid checkpoint and its place in this run; raises `UserError` if it is of another run."""
    start = load_first_valid(starts, settings.to_json(), changed=may_change_settings(settings.run))
    start = compare_data(start, data, changed=settings.run.resume_allow_changed)
    if bool(start.metadata.settings.get("ema_decay")) != bool(settings.network.ema_decay):  # which weights are scored
        start = without_scores(start)
    start = map_place(start, settings.optim.batch_size, source.steps_per_epoch, data.train_examples)
    return check_length(start, settings.optim.total_steps(source.steps_per_epoch))


def restore_normalization(source: BatchSource, start: ResumePoint) -> None:
    """Normalize as the checkpoint's run did, whether its images were in memory or streamed."""
    saved, own = start.metadata.normalization, source.normalize
    if saved is not None:
        source.normalize = Normalize.from_metadata(saved, own.mean.device, own.layout)


def compile_and_profile(run: TrainingRun) -> None:
    """Compile the step and start the profiler, if enabled."""
    if run.settings.compute.compile != "off" and run.trainer.state.step < run.total_steps:
        (images, _), *_ = next(run.source.train_batches(0)).micro_batches
        compile_result = compile_step(run.trainer, run.total_steps - run.trainer.state.step, images)
        run.progress.print(compile_result)
    if run.settings.run.profile and run.group.is_main:
        run.profiler = Profiler(run.settings.run.profile, run.folder, run.group.device, run.progress.print)
        run.trainer.mark_phase = run.profiler.phase
