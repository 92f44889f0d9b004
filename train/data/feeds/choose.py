"""Choose the source of a run's batches: images in memory, or files that are decoded while it trains."""

from __future__ import annotations

from dataclasses import replace

import torch

from entrypoint.plan.model import Plan
from train.data.datasets import DataSet, ImageTensors
from train.data.feeds.batches import BatchSource
from train.data.feeds.loader import BatchLoader, ImageDataset
from train.data.feeds.memory import MemorySource
from train.data.feeds.stream import StreamSource
from train.data.target_table import output_scale
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
