"""The plain loop with accelerate's `prepare`, for its launcher."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn

from benchmarks.peers.common import Clock, loaders, read_task


def main() -> None:
    """Train, evaluate, save."""
    task, accelerator = read_task(), Accelerator(cpu=True)
    network = task.network()
    optimizer = task.optimizer(network)
    loader, test = loaders(task)
    model, optimizer, train, test = accelerator.prepare(network, optimizer, loader, test)
    schedule, criterion = task.schedule(optimizer), nn.CrossEntropyLoss()
    model.train()
    for images, labels in Clock(task).batches(lambda: train):
        optimizer.zero_grad()
        accelerator.backward(criterion(model(images), labels))
        optimizer.step()
        schedule.step()
    model.eval()
    right = count = 0
    with torch.no_grad():
        for images, labels in test:
            predicted, known = accelerator.gather_for_metrics((model(images).argmax(1), labels))
            right, count = right + int((predicted == known).sum()), count + len(known)
    accelerator.save(accelerator.unwrap_model(model).state_dict(), f"{task.out}.pt")
    accelerator.print(f"{100 * right / count:.2f} %")
    accelerator.end_training()


if __name__ == "__main__":
    main()
