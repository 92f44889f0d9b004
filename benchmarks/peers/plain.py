"""A plain PyTorch loop with DataLoader, as in its tutorials; under torchrun with DistributedDataParallel."""

from __future__ import annotations

import os

import torch
from torch import distributed, nn

from benchmarks.peers.common import Clock, loaders, read_task


def main() -> None:
    """Train, evaluate, save."""
    task, ranks = read_task(), int(os.environ.get("WORLD_SIZE", "1"))
    network = task.network()
    model: nn.Module = network
    if ranks > 1:
        distributed.init_process_group("gloo")
        model = nn.parallel.DistributedDataParallel(network)
    optimizer = task.optimizer(model)
    schedule, criterion = task.schedule(optimizer), nn.CrossEntropyLoss()
    train, test = loaders(task, sharded=ranks > 1)
    model.train()
    for images, labels in Clock(task).batches(lambda: train):
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for images, labels in test:
            right += int((model(images).argmax(1) == labels).sum())
    torch.save(network.state_dict(), f"{task.out}.pt")
    print(f"{100 * right / len(test.dataset):.2f} %")  # type: ignore[arg-type]
    if ranks > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
