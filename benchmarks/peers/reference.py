"""The loop of torchvision's reference scripts (references/classification/train.py), implemented again.

It adds to a plain loop: label smoothing; loss and both accuracies read after every step; a line every ten steps.
It also evaluates in inference mode, and saves a checkpoint with optimizer and schedule.
"""

from __future__ import annotations

import time
from collections import deque

import torch
from torch import Tensor, nn

from benchmarks.peers.common import Clock, loaders, read_task

PRINT_EVERY = 10


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1, 5)) -> list[Tensor]:
    """Return the share of labels among the k most likely classes, in percent, for each k."""
    with torch.inference_mode():
        _, predicted = output.topk(max(topk), 1)
        correct = predicted.t().eq(target[None])
        return [correct[:k].flatten().sum(dtype=torch.float32) * (100.0 / target.size(0)) for k in topk]


def main() -> None:
    """Train, evaluate, save."""
    task = read_task()
    model = task.network()
    optimizer = task.optimizer(model)
    schedule, criterion = task.schedule(optimizer), nn.CrossEntropyLoss(label_smoothing=0.1)
    train, test = loaders(task)
    meters: dict[str, deque[float]] = {name: deque(maxlen=20) for name in ("loss", "acc1", "acc5", "img/s")}
    model.train()
    for index, (images, labels) in enumerate(Clock(task).batches(lambda: train)):
        started = time.time()
        output = model(images)
        loss = criterion(output, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        best, among_five = accuracy(output, labels)
        seen = (loss.item(), best.item(), among_five.item(), len(images) / (time.time() - started))
        for meter, value in zip(meters.values(), seen, strict=True):
            meter.append(value)
        if index % PRINT_EVERY == 0:
            print("  ".join(f"{name}: {sum(meter) / len(meter):.4f}" for name, meter in meters.items()))
    model.eval()
    with torch.inference_mode():
        shares = [(accuracy(model(images), labels)[0].item(), len(labels)) for images, labels in test]
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": schedule.state_dict()}
    torch.save(saved, f"{task.out}.pt")
    print(f"{sum(share * count for share, count in shares) / sum(count for _, count in shares):.2f} %")


if __name__ == "__main__":
    main()
