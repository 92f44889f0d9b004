"""Parts shared by all peers: the model, the usual way to load images, and the clock."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder

from train.models.registry import build_model
from train.setting_groups.network import NetworkSettings

T = TypeVar("T")
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
WARM_STEPS = 5


@dataclass(frozen=True)
class Task:
    """What is trained, equal for all peers."""

    data: Path
    model: str
    batch: int
    steps: int
    out: Path

    def network(self) -> nn.Module:
        """Return the model with seeded weights."""
        torch.manual_seed(0)
        return build_model(NetworkSettings(model=self.model), (3, 32, 32), 10)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that the trainer uses by default."""
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)

    def schedule(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        """Return one cycle over all steps."""
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=self.steps + 1)


def read_task() -> Task:
    """Return the task from the command line."""
    parser = argparse.ArgumentParser()
    for name, kind in (("data", Path), ("model", str), ("batch", int), ("steps", int), ("out", Path)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    return Task(**vars(parser.parse_args()))


def loaders(task: Task, *, sharded: bool = False) -> tuple[DataLoader[torch.Tensor], DataLoader[torch.Tensor]]:
    """Return the loaders for training (flipped and shifted images, one worker per core) and for the test."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augmented = transforms.Compose(
        [transforms.RandomHorizontalFlip(), transforms.RandomCrop(32, padding=4), *to_tensor]
    )
    train = ImageFolder(task.data / "train", augmented)
    test = ImageFolder(task.data / "test", transforms.Compose(to_tensor))
    sampler: DistributedSampler[torch.Tensor] | None = DistributedSampler(train) if sharded else None
    workers = max(1, len(os.sched_getaffinity(0)) // ranks)
    return (
        DataLoader(
            train, task.batch // ranks, shuffle=sampler is None, sampler=sampler, num_workers=workers, drop_last=True,
            persistent_workers=True,
        ),
        DataLoader(test, 1000, num_workers=workers),
    )  # fmt: skip


class Clock:
    """Measures the images per second of all steps except the first ones."""

    def __init__(self, task: Task) -> None:
        self.task, self.done, self.started = task, 0, 0.0

    def tick(self) -> bool:
        """Count a step; return whether more steps follow."""
        self.done += 1
        if self.done == WARM_STEPS:
            self.started = time.perf_counter()
        return self.done < self.task.steps

    def batches(self, epoch: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Yield the batches of successive epochs, one per step, until all steps are done; then write the rate."""
        while True:
            for batch in epoch():
                yield batch
                if not self.tick():
                    return self.write_rate()

    def write_rate(self) -> None:
        """Write the rate to the file that the benchmark reads; only rank 0 does."""
        rate = self.task.batch * (self.done - WARM_STEPS) / (time.perf_counter() - self.started)
        if os.environ.get("RANK", "0") == "0":
            self.task.out.write_text(json.dumps({"images_per_second": rate}))
