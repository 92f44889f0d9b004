"""Choose the source of a run's batches: images in memory, or files that are decoded while it trains."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from entrypoint.plan.model import Plan
from train.checkpoint.metadata import OutputScale
from train.data.datasets import DataSet, ImageTensors
from train.data.feeds.batches import BatchSource
from train.data.feeds.loader import BatchLoader, ImageDataset
from train.data.feeds.memory import MemorySource
from train.data.feeds.stream import StreamSource
from train.data.sources.targets import Targets
from train.data.workers import WorkerSpec
from train.distributed.process_group import ProcessGroup
from train.settings import TrainSettings
from train.transforms.normalize import Normalize
from train.transforms.registry import select_transform


def build_loader(data: DataSet, settings: TrainSettings, group: ProcessGroup, plan: Plan) -> BatchLoader | None:
    """Return this rank's loader of a streamed data set, or None for a data set in memory."""
    if isinstance(data.train, ImageTensors) or isinstance(data.test, ImageTensors):
        return None
    sharing = plan.ranks if plan.binding.cpu_binding == "none" else (plan.ranks[group.local_rank],)
    workers = WorkerSpec(frozenset(cpu for rank in sharing for cpu in rank.cpus), plan.the_trainer().num_workers)
    view = select_transform(settings.data, data.shape[0]).eval_view(data.shape)
    dataset = ImageDataset((data.train, data.test), data.shape, view)
    return BatchLoader(dataset, workers, group.device, may_grow=settings.data.num_workers == "auto")


def build_source(
    data: DataSet,
    loader: BatchLoader | None,
    settings: TrainSettings,
    group: ProcessGroup,
    normalization: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
) -> BatchSource:
    """Return the batch source for a data set in memory or a streamed one.

    `normalization` is mean and standard deviation of each channel from 0 to 1, None for the training images' own.
    """
    known = None
    if normalization:
        mean, deviation = (torch.tensor(one) * 255 for one in normalization)
        known = Normalize.from_stats(mean, deviation, group.device, channels_last=settings.compute.channels_last)
    source: BatchSource
    if loader:
        source = StreamSource(loader, settings, group, known, data.rows)
    else:
        assert isinstance(data.train, ImageTensors)
        assert isinstance(data.test, ImageTensors)
        source = MemorySource(data.train, data.test, settings, group, known, data.rows)
    source.normalize = replace(source.normalize, outputs=output_scale(data, settings))
    return source


def raw_table(targets: Targets) -> Tensor:
    """Return (rows, names) doubles as they stand in the files."""
    return torch.frombuffer(targets.values, dtype=torch.float64).view(-1, len(targets.names))


def output_scale(data: DataSet, settings: TrainSettings) -> OutputScale:
    """Return how a model's outputs are read: those of a regression by the training images' mean and deviation."""
    if settings.data.task == "multilabel" and settings.run.threshold != "auto":
        return OutputScale(threshold=settings.run.threshold)
    if data.targets is None or settings.data.task != "regress":
        return OutputScale()
    values = raw_table(data.targets)[data.trained_labels]
    deviation = values.std(0, correction=0)
    deviation[deviation == 0] = 1
    return OutputScale(mean=tuple(values.mean(0).tolist()), deviation=tuple(deviation.tolist()))


def as_learned(table: Tensor, outputs: OutputScale) -> Tensor:
    """Return (rows, names) floats as the model learns them."""
    if outputs.mean:
        mean, deviation = (torch.tensor(one, dtype=torch.float64) for one in (outputs.mean, outputs.deviation))
        table = (table - mean) / deviation
    return table.float()
