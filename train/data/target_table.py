"""The targets of a data set as a tensor: a row for each label number."""

from __future__ import annotations

import torch
from torch import Tensor

from train.checkpoint.metadata import OutputScale
from train.data.datasets import DataSet
from train.data.sources.targets import Targets
from train.settings import TrainSettings


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
